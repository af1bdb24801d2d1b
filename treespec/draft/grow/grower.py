"""The seam of policies: a grower shapes the trees of one text by one policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow.growth import Growth
from treespec.draft.pace.times import Times
from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

P = TypeVar("P")


@dataclass(frozen=True)
class DraftModel:
    """What the pairing rules ask of a draft model; names and small files tell it before weights are
    read.

    several: models that take turns. trained: it is a head. deepest: levels that it drafts; None:
    any number.
    calibrated: whether a head's calibration.json is there.
    """

    several: bool = False
    trained: bool = False
    deepest: int | None = None
    calibrated: bool = False


@dataclass(frozen=True)
class Means:
    """What trees are grown with.

    times: measured costs, asked for at the first cycle that needs them.
    """

    scheme: Scheme
    calibration: Calibration | None = None
    times: Callable[[], Times] | None = None

    def scheme_at(self, params: SamplingParams) -> Scheme:
        """At temperature 0 the likeliest tokens are taken, whatever the scheme."""
        return TopK() if params.greedy else self.scheme


class Grower(Generic[P]):
    """Grows the trees of one text by a policy of type P, and keeps what that policy learns from the
    text.
    """

    def __init__(self, policy: P, means: Means) -> None:
        self.policy, self.means = policy, means

    @staticmethod
    def fits(policy: P, scheme: Scheme, model: DraftModel) -> None:
        """Raises InputError for a scheme or draft model that the policy does not go with."""
        raise NotImplementedError

    def rests(self, params: SamplingParams) -> bool:
        """Whether the text goes without drafts this cycle. Asked once a cycle, before `grow`."""
        return False

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """root: [1] int64. logits: [1, V] draft logits of its children."""
        raise NotImplementedError

    def feedback(self, path: Sequence[int]) -> None:
        """A cycle has ended. path: the accepted nodes, without the root."""


def check_one_law(model: DraftModel) -> None:
    """Raises InputError for draft models that take turns, where a policy looks at one draft law a
    node.
    """
    if model.several:
        raise InputError(
            "draft models that take turns need a tree of fixed shape: take --tree eagle or 2x4"
        )


def check_depth(levels: int, model: DraftModel, form: str) -> None:
    """Raises InputError for a tree of more levels than the model drafts.

    form: of the --tree that is offered.
    """
    if model.deepest is not None and levels > model.deepest:
        raise InputError(
            f"the tree is {levels} deep, the head drafts {model.deepest} tokens: take --tree {form}{model.deepest}"
        )


def check_width(draws: int, scheme: Scheme) -> None:
    """Raises InputError for more draws a node than the scheme answers."""
    if scheme.max_draws and draws > scheme.max_draws:
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, this tree makes {draws}; "
            f"take --tree {'chain:5' if scheme.max_draws == 1 else f'balanced:{scheme.max_draws}x3'}"
        )
