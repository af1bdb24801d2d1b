"""Answers of a least length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class LeastTokens:
    """Forbids the end tokens before the answer has `least` tokens.

    ends: the tokens that end an answer.
    """

    least: int
    ends: tuple[int, ...]

    def begin(self, prompt: Sequence[int]) -> "LeastTokens":
        return self

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        rows = [row for row, path in enumerate(paths) if len(answer) + len(path) < self.least]
        if not rows or not self.ends:
            return logits
        ends = torch.tensor(self.ends, device=logits.device)
        early = torch.tensor(rows, device=logits.device)
        return logits.index_put((early[:, None], ends), logits.new_tensor(-torch.inf))
