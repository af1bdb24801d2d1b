"""Conversations as tokens, and which of them are held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from treespec.errors import InputError


@dataclass(frozen=True)
class Example:
    """A conversation as tokens, for training.

    input_ids: [T] int64. loss_mask: [T] bool, true at the assistant's answers and their end tokens.
    key: a digest of the messages, the same in every run.
    thoughtless: answers that do not count, as the template drops their thoughts.
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""
    thoughtless: int = 0


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out). A hash draws the share `fraction` of distinct conversations to hold out.

    The order of the file does not matter, and equal conversations stay together. At least one is
    held out, unless fraction is 0 or all are the same. Raises InputError outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}, must lie in [0, 1)")
    drawn = sorted({example.key for example in examples}, key=lambda key: digest(f"{seed} {key}"))
    count = min(max(1, round(fraction * len(drawn))), len(drawn) - 1) if fraction and drawn else 0
    held_out = set(drawn[:count])
    return (
        [example for example in examples if example.key not in held_out],
        [example for example in examples if example.key in held_out],
    )


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
