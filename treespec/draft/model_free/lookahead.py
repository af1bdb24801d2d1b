"""Drafts that the target makes on the side, in its own forwards.

Lookahead decoding (Fu et al. 2024, 2402.02057): every forward carries a window of guesses, N - 1 rows
of W tokens, from successive cycles. The target's most likely tokens after the last row are the new
row. Each column of a full window, with its token of the new row, is an n-gram for the pool. The pool's
n-grams that begin with the root are the tree. W = 3, N = 3, and the new row c:

    depth  0 1 2 3              sees  root b0 b1 b2 a1 a2       pool: root b0 c0
    row 0  root a1 a2             b0   x    x                         a1   b1 c1
    row 1    b0 b1 b2             b1   x       x     x                a2   b2 c2
                                  b2   x          x  x  x
           c0 c1 c2               a1   x             x
                                  a2   x             x  x

A token sees the first row up to its own column, and its column up to its own row. The window then
moves on by one token, however many were accepted, as in the released code. Row 1 and row c are the
next window; the root takes the place of b0.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.guess import Guess
from treespec.draft.model_free.matches import tree_of
from treespec.draft.model_free.one_hot import TextDrafter
from treespec.draft.options import LookaheadOptions
from treespec.model.target import Target, TreeOutput
from treespec.trees.tree import Rows
from treespec.verify.walk import Judging


@final
class Lookahead(TextDrafter):
    """The window and the pool of one sequence.

    The window starts with one row of random tokens of the text and gains a row a cycle. Each of
    these cycles drops a column, so the first row is wider. Guesses are the target's most likely
    tokens at every temperature: a sampled guess is wrong more often. The distribution of the text
    does not change, because the guesses are fixed before the tree's tokens are sampled.
    """

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options
        self.window: list[list[int]] = []
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.widest = 1 + (options.window + options.guesses) * (options.ngram - 1)

    def draft(self, text: np.ndarray) -> Guess:
        root = int(text[-1])
        if not self.window:
            self.window = [picks(text, self.options.window + self.options.ngram - 2)]
        self.window[0][0] = root
        known = [*reversed(self.pool.get(root, {}))]
        guess = tree_of(known, self.options.guesses * self.options.ngram)
        return replace(guess, rows=beside(1 + len(guess.tokens), self.window))

    def update(self, guess: Guess, accepted: int, out: TreeOutput) -> Judging:
        below = out.rows if len(self.window) > 1 else torch.cat([out.logits[:1], out.rows])
        new = (yield below.argmax(-1)).tolist()
        if len(self.window) < self.options.ngram - 1:
            self.window = [row[1:] for row in (*self.window, new)]
        else:
            self._keep(zip(*self.window, new, strict=True))
            self.window = [*self.window[1:], new]

    def _keep(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        for first, *rest in ngrams:
            known = self.pool.setdefault(first, {})
            known.pop(tuple(rest), None)
            known[tuple(rest)] = None
            if len(known) > self.options.guesses:
                del known[next(iter(known))]


def picks(text: np.ndarray, number: int) -> list[int]:
    """`number` random tokens of the text, which its last ones decide."""
    return np.random.default_rng(text[-8:]).choice(text, number).tolist()


def beside(nodes: int, window: list[list[int]]) -> Rows:
    """The window as extra rows beside a tree of `nodes` nodes, its last row first.

    Of the tree, the rows see the root alone.
    """
    depth, seen = layout(len(window), len(window[0]))
    *others, first = reversed(window)
    tokens = [token for row in (*others, first[1:]) for token in row]
    root = torch.ones(len(tokens), 1, dtype=torch.bool)
    mask = torch.cat([root, pad(seen, (nodes - 1, 0))], dim=1)
    asked = min(len(window[-1]), len(tokens))
    return Rows(torch.tensor(tokens, dtype=torch.int64), depth, mask, asked)


@lru_cache
def layout(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Depth [M] and mask [M, M] bool of a window's M tokens but the root, the last row first."""
    row = torch.arange(rows).flip(0).repeat_interleave(width)
    column = torch.arange(width).repeat(rows)
    in_first = (row == 0) & (column <= column[:, None])
    in_column = (row <= row[:, None]) & (column == column[:, None])
    kept = row + column > 0
    return (row + column)[kept], (in_first | in_column)[kept][:, kept]


def load_lookahead(spec: DrafterSpec, target: Target) -> TextDrafter:
    return Lookahead(spec.options)
