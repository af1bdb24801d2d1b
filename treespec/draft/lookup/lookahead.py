"""Lookahead decoding (Fu et al. 2024, 2402.02057): the target's own forwards find n-grams, which are drafted later.

Beside the text runs a window of N - 1 rows of W tokens. A row holds the argmax after the tokens of the row above, of
the cycle before: a Jacobi iteration of W positions (`jacobi`). The window's columns, each with the argmax c
after its last token, are n-grams for the pool. W = 3 and N = 3, the root r and five tokens:

    row 0   r ─┬─ a ─┬─ a'          row 0    r   a   a'         pool    r b c
               │     │  └─ b''      row 1    b   b'  b''                a b' c'
               │     └─ b'          argmax   c   c'  c''                a' b'' c''
               └─ b
    row 1      b    b'    b''       next     c   c'  c''  below     b' b'' (the root takes the place of b)

The paper's mask of the lookahead branch is that of a tree: a token sees row 0 up to its own column, then its
column. So the window's tokens are nodes of the draft's tree, as are the pool's n-grams that begin with the root,
the verification branch. Equal paths share their nodes. A node of the window may be accepted, too.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.registry import LookaheadOptions
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target


class Branches:
    """Builds a tree of draft tokens from paths; equal paths share their nodes.

    Attributes:
        tokens, parents: of the nodes, as in `Guess`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.child_of: dict[tuple[int, int], int] = {}  # by parent and token

    def add_child(self, parent: int, token: int) -> int:
        """Returns the node of a token below a node; node 0 is the root."""
        link = (parent, token)
        if link not in self.child_of:
            self.tokens.append(token)
            self.parents.append(parent)
            self.child_of[link] = len(self.tokens)
        return self.child_of[link]

    def add_path(self, tokens: Sequence[int]) -> list[int]:
        """Returns the nodes of a path from the root, with the root."""
        nodes = [0]
        for token in tokens:
            nodes.append(self.add_child(nodes[-1], token))
        return nodes


@final
class Lookahead(TextDrafter):
    """The window and the pool of one sequence.

    The window begins with one row of W + N - 2 tokens, the text's last ones. A cycle adds a row and drops a column,
    until there are N - 1 rows. From then on a cycle drops row 0: the window moves on by one position, however many
    tokens were accepted, as in the paper's code.

    Attributes:
        window: its rows; the first token of row 0 is the root.
        last_nodes: the nodes of its last row in the latest guess.
        pool: by first token the other tokens of its n-grams, at most G, the latest last.
    """

    wants_argmax = True

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options
        self.window: list[list[int]] = []
        self.last_nodes: list[int] = []
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def draft(self, text: np.ndarray) -> Guess:
        # 1. The verification branch, the latest n-gram first.
        root = int(text[-1])
        branches = Branches()
        for ngram in reversed(self.pool.get(root, [])):
            branches.add_path(ngram)

        # 2. The lookahead branch: row 0 is a path, and each column continues below its token of row 0.
        if not self.window:
            width = self.options.window + self.options.ngram - 2
            self.window = [np.resize(text[-width:], width).tolist()]
        first_row, *rows = self.window
        first_row[0] = root
        nodes = branches.add_path(first_row[1:])
        for row in rows:
            nodes = [branches.add_child(*link) for link in zip(nodes, row, strict=True)]
        self.last_nodes = nodes
        return Guess(branches.tokens, branches.parents)

    def learn_argmax(self, argmax: np.ndarray) -> None:
        row = argmax[self.last_nodes].tolist()
        longer = [*self.window, row]
        if len(longer) < self.options.ngram:
            self.window = [tokens[1:] for tokens in longer]
            return
        for first, *others in zip(*longer, strict=True):
            self._keep_ngram(first, tuple(others))
        self.window = longer[1:]

    def _keep_ngram(self, first: int, others: tuple[int, ...]) -> None:
        """Adds an n-gram to the pool, or makes it the latest; the oldest one above G leaves."""
        ngrams = self.pool.setdefault(first, [])
        if others in ngrams:
            ngrams.remove(others)
        ngrams.append(others)
        del ngrams[: -self.options.guesses]


def load_lookahead(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter lookahead:window=15,ngram=5,guesses=15`."""
    return Lookahead(spec.options)
