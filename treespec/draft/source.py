"""The source of drafts, as `Spec` sees it: what it can do, and a drafter over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TypeAlias, final

from torch import nn

from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import CostBy
from treespec.draft.drafter import Drafter, Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.one_hot import OneHotDrafter
from treespec.draft.pairing import check_one_hot, default_tree
from treespec.draft.trained.kinds import KINDS
from treespec.draft.tree_drafter import TreeDrafter
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.trees.shape import Policy
from treespec.verify.walk import Verifier


@final
@dataclass(frozen=True)
class Source:
    """It holds no sequence: each drafter over it starts with one, of which it has observed nothing.

    drafting: a draft model, over which a `TreeDrafter` grows trees, or a drafter of whole trees.
    cache: the suffix cache that drafts next to a draft model.
    """

    drafting: Proposer | Drafter
    cache: OneHotDrafter | None = None

    @property
    def name(self) -> str:
        """A word or two for people, such as `eagle head`, `skip` and `suffix and eagle head`."""
        own = self.drafting.name or type(self.drafting).__name__.removesuffix("Proposer").lower()
        return f"{self.cache.name} and {own}" if self.cache else own

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if it has one."""
        return self.drafting if isinstance(self.drafting, Proposer) else None

    @property
    def head(self) -> Head | None:
        """The trained head, if the draft model is one."""
        return self.proposer.head if self.proposer else None

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it computes with besides the target."""
        return self.drafting.models

    @property
    def q_per_draw(self) -> bool:
        """Whether each draw at a node has a draft distribution of its own."""
        return self.proposer is not None and self.proposer.q_per_draw

    def drafter(
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
        paced = verifier.paced
        if not isinstance(own := self.drafting, Proposer):
            if own.one_hot:
                check_one_hot(self.name, verifier, tree)
            return own.paced(times) if paced else own.new()
        rules = (verifier.scheme, own.max_depth, calibration, own.q_per_draw, paced)
        policy = tree or default_tree(*rules)
        cache = self.cache and (self.cache.paced(times) if policy.timed else self.cache.new())
        return TreeDrafter(own.new(), policy, verifier.scheme, calibration, times, cache)


Drafting: TypeAlias = Source | Head | Proposer | Drafter


def source_for(drafting: Drafting | None, target: Target) -> Source | None:
    """Turn anything that drafts into a source. None stays None: one token at a time."""
    if drafting is None or isinstance(drafting, Source):
        return drafting
    if isinstance(drafting, Proposer | Drafter):
        return Source(drafting)
    return Source(KINDS[drafting.kind].proposer(drafting, target))


def load_source(spec: DrafterSpec, target: Target) -> Source:
    """Load what `--drafter` names. Raises InputError, and whatever loading raises."""
    cache, own = spec.cache, resolve_name(spec.kind.loads)(spec, target)
    return Source(own, resolve_name(cache.kind.loads)(cache, target) if cache else None)
