"""Where the last tokens of a sequence stood before, and the tree of what followed there.

Every n-gram of a few orders leads to its latest place, and every place to the one before with the
same n-gram. In the sequence `a b c a b` the chain of `a b` leads from position 4 to 1:

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
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, final

import numpy as np

from treespec.draft.model_free.datastore import END
from treespec.draft.model_free.guess import Guess

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
        self._start = 0  # of the sequence that grows
        # By order: the latest place of each n-gram, and for each place the one before.
        self._chains = [(order, dict[int, int](), array("q")) for order in ORDERS]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The last sequence grows by these tokens."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for order, last, before in self._chains:
                if end - self._start < order:
                    before.append(-1)
                    continue
                gram = hash(tuple(self.tokens[end - order :]))
                before.append(last.get(gram, -1))
                last[gram] = end - 1

    def end_text(self) -> None:
        """The last sequence ends: no n-gram crosses its end."""
        self._start = len(self.tokens) + 1
        self.extend([END])

    def places(self, context: Sequence[int], longest: int, order: int) -> list[Place]:
        """The latest places of the context's last `order` tokens that a token follows.

        context: its end is looked for; it may be the index's own sequence. longest: the most tokens
        to compare. order: one of ORDERS. Two n-grams of one hash are taken for one: a wrong place
        costs a wrong draft, no more.
        """
        most = min(len(context), longest)
        if order > most:
            return []
        found, tokens = list[Place](), self.tokens
        _, last, before = self._chains[ORDERS.index(order)]
        at = last.get(hash(tuple(context[-order:])), -1)
        while at >= 0 and len(found) < NEWEST:
            if at + 1 < len(tokens) and tokens[at + 1] != END:
                length = order
                while length < min(most, at + 1) and tokens[at - length] == context[-1 - length]:
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


def tree_of(
    places: Sequence[Place],
    nodes: int,
    depth: int,
    rate: Callable[[int], float] | None = None,
    least: float = 0.0,
) -> Guess:
    """The most likely continuations of some places, merged into a tree.

    nodes: the most of them, without the root. depth: the deepest node. rate: Pr(one of a node's
    children is right), by the length of the match above it; None: the tree has no probabilities, and
    the most frequent continuations are kept. least: of a path's probability.
    """
    longest = max((place.length for place in places), default=0)
    tokens, parents, shares, probabilities = list[int](), list[int](), list[float](), [1.0]
    levels = [0]  # depth of each node
    waiting: list[tuple[float, int, int, int, float, list[Place]]] = []
    order = count()  # of equal probabilities the first wins

    def add_children(node: int, reach: float, reached: Sequence[Place]) -> None:
        """Candidates below a node that some places reach."""
        level, below = levels[node], dict[int, list[Place]]()
        for place in reached:
            at = place.next + level
            if at < len(place.tokens) and (token := place.tokens[at]) != END:
                below.setdefault(token, []).append(place)
        right = rate(longest + level) if rate else 1.0
        for token, following in below.items():
            share = len(following) / len(reached)
            if (probability := reach * share * right) >= least:
                heappush(waiting, (-probability, next(order), node, token, share, following))

    # The most likely node of all that wait, and its children in turn.
    add_children(0, 1.0, places)
    while waiting and len(tokens) < nodes:
        negative, _, parent, token, share, reached = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        levels.append(levels[parent] + 1)
        if rate:
            probabilities.append(share * rate(longest + levels[parent]))
        if levels[-1] < depth:
            add_children(len(tokens), -negative, reached)
    return Guess(tokens, parents, np.array(probabilities) if rate else None, shares, longest)
