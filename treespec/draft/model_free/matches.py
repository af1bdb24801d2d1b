"""Where the last tokens of a text stood before, and the tree of what followed there.

Every n-gram of a few orders leads to its latest place, and every place to the one before with the
same n-gram. In the text `a b c a b` the chain of `a b` leads from position 4 to 1:

    position    0  1  2  3  4         last     {a b: 4, b c: 2, c a: 3}
    token       a  b  c  a  b         before   -  -  -  -  1

A search follows the chain of the longest order that the context's end has, and compares backwards
from there. So the index answers what a suffix tree of bounded depth would, in some 200 bytes a token.

The continuations become a tree scored by their counts (SuffixDecoding, 2411.04975). A node's share is
the number of places that continue with its token, over those that reach its parent. The most likely
paths are kept:

    a b c         root ─┬─ a 3/4 ─┬─ b 2/3 ─── c 2/2
    a b c               │         └─ d 1/3
    a d                 └─ e 1/4
    e
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from treespec.draft.model_free.datastore import END

if TYPE_CHECKING:
    from treespec.trees.tree import TokenTree  # loads torch

ORDERS = (8, 4, 2, 1)  # lengths of the n-grams, longest first
NEWEST = 64  # places that a search looks at, the latest ones


class Place(NamedTuple):
    """Tokens [..., next) equal the end of a context. tokens: of the whole index."""

    length: int
    tokens: Sequence[int]
    next: int


@final
class SuffixIndex:
    """Adding a token takes some microseconds; a search looks at NEWEST places of each order at most."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._start = 0  # of the text that grows
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._before = tuple(array("q") for _ in ORDERS)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The last text grows by these tokens."""
        own = self.tokens
        chains = list(zip(ORDERS, self._last, self._before, strict=True))
        for token in tokens:
            own.append(token)
            end = len(own)
            for order, last, before in chains:
                if end - self._start < order:
                    before.append(-1)
                    continue
                gram = hash(tuple(own[end - order :]))
                before.append(last.get(gram, -1))
                last[gram] = end - 1

    def end_text(self) -> None:
        """The last text ends: no n-gram crosses its end."""
        self.tokens.append(END)
        for before in self._before:
            before.append(-1)
        self._start = len(self.tokens)

    def places(self, context: Sequence[int], longest: int, order: int) -> list[Place]:
        """The latest places of the context's last `order` tokens that a token follows.

        context: its end is looked for; it may be the index's own text. longest: the most tokens to
        compare. order: one of ORDERS. Two n-grams of one hash are taken for one: a wrong place costs
        a wrong draft, no more.
        """
        if order > min(len(context), longest):
            return []
        row, found, tokens = ORDERS.index(order), list[Place](), self.tokens
        at = self._last[row].get(hash(tuple(context[-order:])), -1)
        before, most = self._before[row], min(len(context), longest)
        while at >= 0 and len(found) < NEWEST:
            if at + 1 < len(tokens) and tokens[at + 1] != END:
                length = order
                while length < most and at >= length:
                    if tokens[at - length] != context[-1 - length]:
                        break
                    length += 1
                found.append(Place(length, tokens, at + 1))
            at = before[at]
        return found


def longest_match(
    indexes: Sequence[SuffixIndex], context: Sequence[int], longest: int, count: int
) -> list[Place]:
    """The places of the context's longest suffix that occurs `count` times in the indexes together.

    Longer matches among them keep their length. []: no suffix does.
    """
    for order in ORDERS:
        found = [place for index in indexes for place in index.places(context, longest, order)]
        if len(found) >= count:
            least = sorted((place.length for place in found), reverse=True)[count - 1]
            return [place for place in found if place.length >= least]
    return []


@dataclass
class Guess:
    """A tree of guessed tokens below a root that has no token yet.

    length: tokens of the match. tokens, parents: of the nodes but the root, most likely paths first;
    the root is node 0. shares: of the parent's places. probabilities: Pr(a node is accepted | its
    parent is). score: expected accepted tokens.
    """

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    score: float = 0.0

    def tree(self, root: int) -> "TokenTree":
        """On the host, without draft distributions."""
        from torch import from_numpy, tensor

        from treespec.trees.tree import TokenTree

        nodes = 1 + len(self.tokens)
        above, depth = np.eye(nodes, dtype=bool), np.zeros(nodes, dtype=np.int64)
        for node, parent in enumerate(self.parents, start=1):
            above[node] |= above[parent]
            depth[node] = depth[parent] + 1
        tokens, parents = tensor([root, *self.tokens]), tensor([-1, *self.parents])
        return TokenTree(tokens, parents, from_numpy(depth), from_numpy(above))


def guess(
    places: Sequence[Place], nodes: int, least: float, rates: Sequence[float], depth: int
) -> Guess:
    """The most likely continuations of some places.

    nodes: the most of them. least: of a path's probability. rates: probability that one of a node's
    children is right, by the length of the match above it; the last one is for all longer ones.
    depth: the deepest node.
    """
    if not places:
        return Guess()
    made, longest = Guess(max(place.length for place in places)), len(rates) - 1
    levels = [0]  # depth of each node
    waiting: list[tuple[float, int, int, int, float, list[Place]]] = []
    order = count()  # of equal probabilities the first wins

    def add_children(node: int, reach: float, reached: Sequence[Place]) -> None:
        """Candidates below a node that some places reach."""
        level, below = levels[node], dict[int, list[Place]]()
        for place in reached:
            _, tokens, first = place
            at = first + level
            if at < len(tokens) and (token := tokens[at]) != END:
                if token in below:
                    below[token].append(place)
                else:
                    below[token] = [place]
        rate = rates[min(made.length + level, longest)]
        for token, places in below.items():
            share = len(places) / len(reached)
            if (probability := reach * share * rate) >= least:
                heappush(waiting, (-probability, next(order), node, token, share, places))

    # The most likely node of all that wait, and its children in turn.
    add_children(0, 1.0, places)
    while waiting and len(made.tokens) < nodes:
        negative, _, parent, token, share, reached = heappop(waiting)
        made.tokens.append(token)
        made.parents.append(parent)
        made.shares.append(share)
        made.probabilities.append(share * rates[min(made.length + levels[parent], longest)])
        made.score -= negative
        levels.append(levels[parent] + 1)
        if levels[-1] < depth:
            add_children(len(made.tokens), -negative, reached)
    return made


def union(places: Sequence[Place], nodes: int, depth: int) -> Guess:
    """The continuations merged into a tree of at most `nodes` nodes besides the root, most frequent first."""
    return guess(places, nodes, least=0.0, rates=[1.0], depth=depth)
