"""Jacobi decoding (Santilli et al. 2023, 2305.10427): guess the next tokens anew each cycle.

The guesses are the draft, a chain. The target's likeliest token after each guess becomes the next
cycle's guess for that position.
"""

from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.options import JacobiOptions
from treespec.draft.model_free.trie import trie
from treespec.model.target import TreeOutput
from treespec.shaping.sampling import sample_each
from treespec.trees.tree import TokenTree


@final
class Jacobi:
    """The guesses of one text. Positions without a guess get random tokens of the text."""

    widest: ClassVar[int] = 0

    def __init__(self, options: JacobiOptions) -> None:
        self.options = options
        self.guesses: list[int] = []

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        chain = self.guesses + picks(text, self.options.window - len(self.guesses), generator)
        return trie(int(text[-1]), np.array([chain]), nodes=1 + len(chain))

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """The target's choice after node i is the guess for the position after it.

        The choice after the last accepted node is the new root, so guesses start one node later.
        """
        self.guesses = out.logits[accepted + 1 :].argmax(-1).tolist()

    def new(self) -> "Jacobi":
        return Jacobi(self.options)


def picks(text: np.ndarray, number: int, generator: torch.Generator) -> list[int]:
    """`number` random tokens of the text."""
    each = torch.ones(1, len(text), device=generator.device)
    return text[sample_each(each, number, generator)[0].cpu().numpy()].tolist()
