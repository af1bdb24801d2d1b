"""The source of drafts, as `Spec` sees it: what it can do, and a drafter over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TypeAlias, final

from torch import nn

from treespec.draft.auto.cost import CostBy
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Drafter, Proposer
from treespec.draft.heads.loading import build_proposer
from treespec.draft.lookup.one_hot import OneHotDrafter, TextDrafter
from treespec.draft.pairing import check_one_hot, choose_default_tree
from treespec.draft.spec import DrafterSpec
from treespec.draft.tree_drafter import TreeDrafter
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.trees.shape import Policy
from treespec.verify.walk import Verifier


@final
@dataclass(frozen=True)
class DraftSource:
    """It holds no sequence: each drafter over it starts with one, of which it has observed nothing.

    drafting: a draft model, over which a `TreeDrafter` grows trees, or a drafter of whole trees.
    cache: the suffix cache that drafts next to a draft model.
    """

    drafting: Proposer | Drafter
    cache: OneHotDrafter | None = None

    @property
    def name(self) -> str:
        """A word or two for people, such as `eagle head`, `skip` and `suffix and eagle head`."""
        name = self.drafting.name
        if not name:
            name = type(self.drafting).__name__.removesuffix("Proposer").lower()
        if self.cache:
            return f"{self.cache.name} and {name}"
        return name

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if it has one."""
        if isinstance(self.drafting, Proposer):
            return self.drafting
        return None

    @property
    def head(self) -> Head | None:
        """The trained head, if the draft model is one."""
        return self.proposer.head if self.proposer else None

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it computes with besides the target."""
        return self.drafting.models

    def build_drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> Drafter:
        """A drafter for one sequence. tree: None is the default for the verifier.

        times: measures when it is called first. Raises InputError for a tree and verifier that do
        not go with it.
        """
        # 1. A drafter of whole trees.
        if not isinstance(self.drafting, Proposer):
            if self.drafting.one_hot:
                check_one_hot(self.name, verifier, tree)
            if verifier.coupled:
                return self.drafting.copy_with_costs(times)
            return self.drafting.new()

        # 2. A draft model, and a suffix cache next to it.
        policy = tree
        if policy is None:
            policy = choose_default_tree(verifier.scheme, self.drafting.max_depth)
        cache = None
        if self.cache and policy.timed:
            cache = self.cache.copy_with_costs(times)
        elif self.cache:
            cache = self.cache.new()
        proposer = self.drafting.new()
        return TreeDrafter(proposer, policy, verifier.scheme, calibration, times, cache)


Drafting: TypeAlias = DraftSource | Head | Proposer | Drafter | TextDrafter


def as_source(drafting: Drafting, target: Target) -> DraftSource:
    """Turn anything that drafts into a source."""
    if isinstance(drafting, DraftSource):
        return drafting
    if isinstance(drafting, TextDrafter):
        return DraftSource(OneHotDrafter(drafting))
    if isinstance(drafting, Proposer | Drafter):
        return DraftSource(drafting)
    return DraftSource(build_proposer(drafting, target))


def load_source(spec: DrafterSpec, target: Target) -> DraftSource:
    """Load what `--drafter` names. Raises InputError, and whatever loading raises."""
    drafting = resolve_name(spec.kind.loads)(spec, target)
    if not spec.cache:
        return as_source(drafting, target)
    suffix = resolve_name(spec.cache.kind.loads)(spec.cache, target)
    return DraftSource(drafting, OneHotDrafter(suffix))
