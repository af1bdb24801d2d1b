"""Jacobi decoding (Santilli et al. 2023, 2305.10427): all of the next tokens are guessed, and guessed again each cycle.

The guesses are the draft, a chain; the target's likeliest token behind each is the next cycle's guess for its place.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.trie import trie
from treespec.options import check_ranges, option
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


@dataclass(frozen=True)
class JacobiOptions:
    """window: guesses. Raises InputError for a number out of its range."""

    window: int = option("guesses", 15, least=1, most=4095)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@final
class Jacobi:
    """Where nothing is guessed yet stand tokens of the text, at random."""

    widest: ClassVar[int] = 0

    def __init__(self, options: JacobiOptions) -> None:
        self.options = options
        self.guesses: list[int] = []

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        chain = self.guesses + picks(text, self.options.window - len(self.guesses), generator)
        return trie(int(text[-1]), np.array([chain]), nodes=1 + len(chain))

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """Node i has the guess for the place behind it; the one behind the accepted nodes is the root by now."""
        self.guesses = out.logits[accepted + 1 :].argmax(-1).tolist()

    def new(self) -> "Jacobi":
        return Jacobi(self.options)


def picks(text: np.ndarray, number: int, generator: torch.Generator) -> list[int]:
    """So many tokens of the text, at random."""
    places = torch.randint(len(text), (number,), generator=generator, device=generator.device)
    return text[places.cpu().numpy()].tolist()
