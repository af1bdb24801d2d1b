"""The seam of growers: each grows the trees of one text by one policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow.growth import Growth
from treespec.draft.pace.times import TimesBy
from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

P = TypeVar("P")


@dataclass(frozen=True)
class DraftModel:
    """What the pairing rules ask about a draft model, known before its weights are read.

    several: whether these are several models that take turns.
    trained: whether it is a trained head.
    deepest: the largest number of levels that it drafts; None: any number.
    calibrated: whether the head's directory has a calibration.json.
    at_once: whether the law of a level depends on the text alone, so that all are known at first.
    """

    several: bool = False
    trained: bool = False
    deepest: int | None = None
    calibrated: bool = False
    at_once: bool = False


@dataclass(frozen=True)
class Means:
    """What a grower needs besides its policy.

    scheme: makes the draws.
    calibration: the head's acceptance rates, where it has any.
    times: returns the measured seconds for a number of texts; called where a cycle needs them.
    """

    scheme: Scheme
    calibration: Calibration | None = None
    times: TimesBy | None = None

    def scheme_at(self, params: SamplingParams) -> Scheme:
        """The scheme of a cycle: at temperature 0 the likeliest tokens, whatever the scheme."""
        return TopK() if params.greedy else self.scheme


class Grower(Generic[P]):
    """Grows the trees of one text by a policy of type P.

    It keeps the state that the policy learns from the text, such as a threshold.
    ahead: gives the draft logits [D, N] of all levels of the next tree, where a draft model has
    them at once.
    """

    ahead: Callable[[], Tensor] | None = None

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of the cycle that runs; None: the policy models no time."""
        return None

    def __init__(self, policy: P, means: Means) -> None:
        self.policy, self.means = policy, means

    @staticmethod
    def fits(policy: P, scheme: Scheme, model: DraftModel) -> None:
        """Raises InputError for a scheme or draft model that the policy cannot be paired with."""
        raise NotImplementedError

    def rests(self, params: SamplingParams, texts: int = 1) -> bool:
        """Whether the text has no drafts in this cycle. Called once a cycle, before `grow`.

        texts: that the cycle decodes together.
        """
        return False

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """Grow the tree of one cycle.

        root: [1] int64, the last committed token. logits: [1, V] draft logits of its children.
        """
        raise NotImplementedError

    def feedback(self, path: Sequence[int]) -> None:
        """Learn from a verdict. path: the accepted nodes, without the root."""


def check_one_law(model: DraftModel) -> None:
    """Raises InputError for draft models that take turns: the policy needs one law a node."""
    if model.several:
        raise InputError(
            "draft models that take turns need a tree of fixed shape: take --tree eagle or 2x4"
        )


def check_depth(levels: int, model: DraftModel, form: str) -> None:
    """Raises InputError for a tree of more levels than the model drafts.

    form: the start of the `--tree` value that the error offers, such as `chain:`.
    """
    if model.deepest is not None and levels > model.deepest:
        raise InputError(
            f"the tree is {levels} deep, the head drafts {model.deepest} tokens: take --tree "
            f"{form}{model.deepest}"
        )


def check_width(draws: int, scheme: Scheme) -> None:
    """Raises InputError for a tree with more draws a node than the scheme answers."""
    most = scheme.max_draws
    if most and draws > most:
        remedy = "chain:5" if most == 1 else f"balanced:{most}x3"
        raise InputError(
            f"verifier {scheme.name} answers at most {most} draws a node, this tree makes {draws}; "
            f"take --tree {remedy}"
        )
