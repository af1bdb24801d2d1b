"""Biases of single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Bias:
    """Adds a number to the logits of some tokens, as OpenAI's `logit_bias`; -inf forbids a token.

    tokens, values: as long as each other.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def begin(self, prompt: Sequence[int]) -> "Bias":
        return self

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        tokens = torch.tensor(self.tokens, device=logits.device)
        values = torch.tensor(self.values, dtype=logits.dtype, device=logits.device)
        return logits.index_add(1, tokens, values.expand(len(logits), -1))
