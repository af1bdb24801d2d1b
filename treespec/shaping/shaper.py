"""The seam of logits that depend on the text: penalties, biases, grammars, any processor."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Shaper(Protocol):
    """Changes the logits after a text, before temperature, top-k and the rest; one object a text.

    Draft logits and target logits go through the same shapers, each row by its own path. So the
    draft law stays the law of the draws, and verification is lossless for the shaped target law.
    """

    def begin(self, prompt: Sequence[int]) -> "Shaper":
        """A fresh one for a text with this prompt."""
        ...

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        """New logits [N, V] of the token that follows `answer + paths[i]`; -inf forbids a token.

        answer: the committed tokens after the prompt; it only grows from call to call. logits: [N,
        V] in float32 or float64, not to be changed in place. A path may hold tokens that the shaper
        itself forbids. No text goes there, so any logits will do.
        """
        ...
