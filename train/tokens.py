"""The tokens that a cross-entropy is over: all, a draft vocabulary, or frequent ones with a sample.

Over frequent tokens alone nothing would teach a head that the others are unlikely, and where it
drafts all tokens they would win. So each batch adds random others, and each of them stands for as
many as it was drawn from: its logit rises by log(others / drawn), in the head's law and in the
target's. The sum over the vocabulary, the softmax's denominator, is right on average.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.model.target import Target

DRAWN = 1024  # random tokens a batch


@final
@dataclass(frozen=True)
class LawTokens:
    """frequent: [N] int64 ascending. others: int64, of which a batch draws some; may be none."""

    frequent: Tensor
    others: Tensor

    @classmethod
    def of(cls, frequent: Tensor, drafted: Tensor) -> "LawTokens":
        """drafted: [D] int64, the tokens that the head will draft; batches draw from the others."""
        return cls(frequent, drafted[~torch.isin(drafted, frequent)])

    @property
    def width(self) -> int:
        """Tokens in one batch."""
        return len(self.frequent) + min(DRAWN, len(self.others))

    def logits(self, target: Target, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """[M, H] -> [M, N + drawn] logits for one batch. generator: draws its other tokens."""
        drawn = min(DRAWN, len(self.others))
        if not drawn:
            rows = target.output_rows(self.frequent)
            return lambda hidden: target.output_logits(hidden, rows)
        chosen = torch.randint(
            len(self.others), (drawn,), generator=generator, device=generator.device
        ).to(self.others.device)
        rows = target.output_rows(torch.cat([self.frequent, self.others[chosen]]))
        weights = torch.zeros(len(self.frequent) + drawn, device=target.output_device)
        weights[len(self.frequent) :] = math.log(len(self.others) / drawn)
        return lambda hidden: target.output_logits(hidden, rows) + weights
