"""Lookahead decoding (Fu et al. 2024, 2402.02057): n-grams that the target makes on the side are the drafts.

A window of guesses rides in every target forward, N - 1 rows of W tokens, the rows of successive cycles. The target's
likeliest tokens behind the last row are the next row, and each column of a full window with the token below it is an
n-gram, kept in a pool. The pool's n-grams that begin with the root are the tree. W = 3, N = 3, and the new row c:

    depth  0 1 2 3              sees  root b0 b1 b2 a1 a2       pool: root b0 c0
    row 0  root a1 a2             b0   x    x                         a1   b1 c1
    row 1    b0 b1 b2             b1   x       x     x                a2   b2 c2
                                  b2   x          x  x  x
           c0 c1 c2               a1   x             x
                                  a2   x             x  x

A token sees the first row up to its own column, and its column up to its own row. The window then moves on by one
token, however many were accepted, as in the released code: row 1 and row c are the next window, without b0, where the
root stands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.model_free.jacobi import picks
from treespec.draft.model_free.trie import trie
from treespec.options import check_ranges, option
from treespec.target import TreeOutput
from treespec.trees.tree import Rows, TokenTree


@dataclass(frozen=True)
class LookaheadOptions:
    """window: W, tokens of a row. ngram: N. guesses: G, n-grams that are kept of each first token, the latest.

    Raises InputError for a number out of its range.
    """

    window: int = option("tokens of a row", 15, least=1, most=1024)
    ngram: int = option("tokens of an n-gram", 5, least=2, most=64)
    guesses: int = option("n-grams that are kept of each first token", 15, least=1, most=1024)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@final
class Lookahead:
    """The window and the pool of one text.

    The window is filled a row a cycle, from tokens of the text at random; it is wider by those that each step drops.
    Its tokens are the likeliest at every temperature: any draft that is made before the tree's tokens are sampled
    leaves their law alone, and a sampled guess is wrong more often.
    """

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options
        self.window: list[list[int]] = []
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}

    @property
    def widest(self) -> int:
        by = self.options
        return 1 + by.window * (by.ngram - 1) + by.guesses * (by.ngram - 1)

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        root = int(text[-1])
        if not self.window:
            self.window = [picks(text, self.options.window + self.options.ngram - 2, generator)]
        self.window[0][0] = root
        latest = list(reversed(self.pool.get(root, {})))
        guesses = np.array(latest, dtype=np.int64).reshape(len(latest), self.options.ngram - 1)
        tree = trie(root, guesses, nodes=1 + guesses.size)
        return replace(tree, rows=beside(len(tree.tokens), self.window))

    def settle(self, accepted: int, out: TreeOutput) -> None:
        assert out.rows is not None
        below = out.rows if len(self.window) > 1 else torch.cat([out.logits[:1], out.rows])
        new = below.argmax(-1).tolist()
        if len(self.window) < self.options.ngram - 1:
            self.window = [row[1:] for row in (*self.window, new)]
        else:
            self._keep(zip(*self.window, new, strict=True))
            self.window = [*self.window[1:], new]

    def new(self) -> "Lookahead":
        return Lookahead(self.options)

    def _keep(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        for first, *rest in ngrams:
            known = self.pool.setdefault(first, {})
            known.pop(tuple(rest), None)
            known[tuple(rest)] = None
            if len(known) > self.options.guesses:
                del known[next(iter(known))]


def beside(nodes: int, window: list[list[int]]) -> Rows:
    """The window as rows of a forward beside a tree of so many nodes, of which it sees the root; its last row first."""
    depth, seen = layout(len(window), len(window[0]))
    *others, first = reversed(window)
    tokens = [token for row in (*others, first[1:]) for token in row]
    mask = torch.cat([torch.ones(len(tokens), 1, dtype=torch.bool), pad(seen, (nodes - 1, 0))], dim=1)
    return Rows(torch.tensor(tokens, dtype=torch.int64), depth, mask, min(len(window[-1]), len(tokens)))


@lru_cache
def layout(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Of a window's M tokens without the root, the last row first: depth [M], and who sees whom [M, M] bool."""
    row, column = torch.arange(rows).flip(0).repeat_interleave(width), torch.arange(width).repeat(rows)
    in_first = (row == 0) & (column <= column[:, None])
    in_column = (row <= row[:, None]) & (column == column[:, None])
    kept = row + column > 0
    return (row + column)[kept], (in_first | in_column)[kept][:, kept]
