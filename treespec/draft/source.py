"""`DraftSource`: a loaded draft model or drafter, from which `Spec` builds a drafter for each sequence."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any, TypeAlias, final

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
    """Builds drafters, and keeps no state of sequences.

    Attributes:
        drafting: a draft model, with which a `TreeDrafter` grows trees, or a drafter of complete trees.
        cache: the suffix cache that drafts next to a draft model; None: none.
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
        """The draft models that it runs besides the target."""
        return self.drafting.models

    def build_drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> Drafter:
        """Builds a drafter for one sequence.

        Args:
            tree: None: the verifier's default.
            verifier: verifies the trees.
            calibration: the head's; None: it has none.
            times: the cost by batch size; its first call measures it.

        Raises:
            InputError: tree and verifier do not go with this drafter.
        """
        # 1. A drafter of complete trees.
        if not isinstance(self.drafting, Proposer):
            if self.drafting.one_hot:
                check_one_hot(self.name, verifier, tree)
            drafter = self.drafting.build_for(tree, verifier.scheme)
            if verifier.coupled:
                return drafter.copy_with_costs(times)
            return drafter

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
    """Wraps a head, proposer or drafter in a source."""
    if isinstance(drafting, DraftSource):
        return drafting
    if isinstance(drafting, TextDrafter):
        return DraftSource(OneHotDrafter(drafting))
    if isinstance(drafting, Proposer | Drafter):
        return DraftSource(drafting)
    return DraftSource(build_proposer(drafting, target))


def load_class(spec: DrafterSpec, target: Target) -> Any:
    """Builds a drafter of the class that `--drafter module:NAME` names, with its options.

    The class gets `target` too if it has a parameter of that name.
    """
    drafter_class = resolve_name(spec.kind.made_by)
    arguments: dict[str, Any] = {}
    if spec.options is not None:
        arguments = asdict(spec.options)
    if "target" in inspect.signature(drafter_class).parameters:
        arguments["target"] = target
    return drafter_class(**arguments)


def load_source(spec: DrafterSpec, target: Target) -> DraftSource:
    """Loads the drafter that `--drafter` names. Raises InputError, and any error of loading."""
    drafting = resolve_name(spec.kind.loads)(spec, target)
    if not spec.cache:
        return as_source(drafting, target)
    suffix = resolve_name(spec.cache.kind.loads)(spec.cache, target)
    return DraftSource(drafting, OneHotDrafter(suffix))
