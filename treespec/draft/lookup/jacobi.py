"""Jacobi decoding (Santilli et al. 2023, 2305.10427): the target improves a chain of guesses in its own forwards.

Greedy text solves the equations `token = argmax after the tokens before it`. A forward over the text and guesses of
its next tokens is a Jacobi iteration of all these equations: the argmax after each guess is the next guess for the
position after it. Every cycle solves at least one equation, because the root's argmax is right.

The root r, four guesses a b c d, and the argmax after each of these five tokens:

    position    0   1   2   3   4   5   6
    guesses     r   a   b   c   d
    argmax          a   x   y   z   e           a is accepted, x is the next root
    guesses                 y   z   e   x       a position without a guess gets the root
"""

from typing import final

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.registry import JacobiOptions
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target


@final
class Jacobi(TextDrafter):
    """The guesses of one sequence.

    Guesses are most likely tokens at every temperature: a sampled guess is accepted less often.

    Attributes:
        guesses: tokens of successive positions.
        start: the position of the first guess.
    """

    wants_argmax = True

    def __init__(self, options: JacobiOptions) -> None:
        self.options = options
        self.guesses: list[int] = []
        self.start = 0

    def draft(self, text: np.ndarray) -> Guess:
        passed = len(text) - self.start
        kept = self.guesses[passed : passed + self.options.tokens]
        root = int(text[-1])
        missing = self.options.tokens - len(kept)
        self.guesses = kept + [root] * missing
        self.start = len(text)
        return Guess.chain(self.guesses)

    def learn_argmax(self, argmax: np.ndarray) -> None:
        # The argmax after the root is the guess for the position after it, `start`.
        self.guesses = argmax.tolist()


def load_jacobi(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter jacobi:tokens=8`."""
    return Jacobi(spec.options)
