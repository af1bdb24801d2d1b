"""The seam of growers: each grows the trees of one text by one policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow.growth import Growth
from treespec.draft.pace.times import TimesBy
from treespec.shaping.sampling import SamplingParams
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

P = TypeVar("P")


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
