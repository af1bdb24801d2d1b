"""The source of drafts, as `Spec` sees it: what it can do, and a drafter over it.

A draft model, such as a trained head, is a `Proposer`; a `TreeDrafter` grows trees over it. All
other sources are a `Drafter` already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, cast, final

from torch import nn

from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import CostBy
from treespec.draft.drafter import Drafter
from treespec.draft.fits import default_tree
from treespec.draft.joint import Joint
from treespec.draft.model_free.suffix import Suffix
from treespec.draft.pairing import check_given
from treespec.draft.proposer import Proposer
from treespec.draft.trained.kinds import KINDS
from treespec.draft.tree_drafter import TreeDrafter
from treespec.draft.union_drafter import UnionDrafter
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.trees.shape import Policy
from treespec.verify.facts import is_paced
from treespec.verify.walk import Verifier


class Source(Protocol):
    """It holds no text: each drafter over it starts with one, of which it has observed nothing."""

    @property
    def name(self) -> str:
        """A word or two for people."""
        ...

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if it has one."""
        ...

    @property
    def head(self) -> Head | None:
        """The trained head, if the draft model is one."""
        ...

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it computes with besides the target."""
        ...

    @property
    def law_per_draw(self) -> bool:
        """Whether each draw at a node has a draft law of its own."""
        ...

    def drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> Drafter:
        """A drafter for one text. tree: None is the default for the verifier.

        times: measures when it is called first. Raises InputError for a tree and verifier that do
        not go with it.
        """
        ...


@final
@dataclass(frozen=True)
class Model:
    """A draft model."""

    proposer: Proposer

    @property
    def name(self) -> str:
        """`eagle head`; of other draft models the class: SkipProposer -> skip."""
        if self.head:
            return f"{self.head.kind} head"
        return type(self.proposer).__name__.removesuffix("Proposer").lower()

    @property
    def head(self) -> Head | None:
        return self.proposer.head

    @property
    def models(self) -> Sequence[nn.Module]:
        return self.proposer.models

    @property
    def law_per_draw(self) -> bool:
        return self.proposer.law_per_draw

    def drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> TreeDrafter:
        scheme, deepest = verifier.scheme, self.proposer.max_depth
        policy = tree or default_tree(
            scheme, deepest, calibration, self.law_per_draw, is_paced(verifier)
        )
        return TreeDrafter(self.proposer.new(), policy, scheme, calibration, times)


@final
@dataclass(frozen=True)
class WholeTrees:
    """A drafter that returns whole trees."""

    original: Drafter
    proposer: ClassVar[Proposer | None] = None
    head: ClassVar[Head | None] = None
    law_per_draw: ClassVar[bool] = False

    @property
    def models(self) -> Sequence[nn.Module]:
        return self.original.models

    @property
    def name(self) -> str:
        return self.original.name or type(self.original).__name__.lower()

    def drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> Drafter:
        if self.original.given:
            check_given(self.name, verifier, tree)
        return self.original.paced(times) if is_paced(verifier) else self.original.new()


@final
@dataclass(frozen=True)
class Joined:
    """A memory and a draft model."""

    memory: Suffix
    model: Model

    @property
    def name(self) -> str:
        return f"suffix and {self.model.name}"

    @property
    def proposer(self) -> Proposer | None:
        return self.model.proposer

    @property
    def head(self) -> Head | None:
        return self.model.head

    @property
    def models(self) -> Sequence[nn.Module]:
        return self.model.models

    @property
    def law_per_draw(self) -> bool:
        return self.model.law_per_draw

    def drafter(
        self,
        tree: Policy | None,
        verifier: Verifier,
        calibration: Calibration | None,
        times: CostBy,
    ) -> Drafter:
        trees = self.model.drafter(tree, verifier, calibration, times)
        return UnionDrafter(trees, self.memory.new(), times if trees.timed else None)


Drafting: TypeAlias = Source | Head | Proposer | Drafter | Joint


def source_for(drafting: Drafting | None, target: Target) -> Source | None:
    """Turn anything that drafts into a source. None stays None: one token at a time."""
    if drafting is None or isinstance(drafting, Model | WholeTrees | Joined):
        return drafting
    if isinstance(drafting, Joint):
        return Joined(drafting.memory, cast(Model, source_for(drafting.drafting, target)))
    if kind := KINDS.get(getattr(drafting, "kind", "")):
        return Model(kind.proposer(drafting, target))
    if hasattr(drafting, "draft_trees"):
        return WholeTrees(cast(Drafter, drafting))
    return Model(cast(Proposer, drafting))
