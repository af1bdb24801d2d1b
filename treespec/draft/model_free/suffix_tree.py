"""Continuations of a match, as a tree scored by their counts (SuffixDecoding, 2411.04975).

A node's share is the number of places that continue with its token, over those that reach its
parent. The likeliest paths become the tree:

    a b c         root ─┬─ a 3/4 ─┬─ b 2/3 ─── c 2/2
    a b c               │         └─ d 1/3
    a d                 └─ e 1/4
    e
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
import torch

from treespec.draft.model_free.suffix_index import END, Place
from treespec.trees.tree import TokenTree


@dataclass
class Guess:
    """A tree of guessed tokens below a root that has no token yet.

    length: tokens of the match. tokens, parents: of the nodes but the root, in the order of their
    chances; the root is node 0. shares: of the parent's places. chances: Pr(a node is accepted | its
    parent is). score: the accepted tokens that it promises.
    """

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    score: float = 0.0

    def tree(self, root: int) -> TokenTree:
        """On the host, without laws."""
        count = 1 + len(self.tokens)
        above, depth = np.eye(count, dtype=bool), np.zeros(count, dtype=np.int64)
        for node, parent in enumerate(self.parents, start=1):
            above[node] |= above[parent]
            depth[node] = depth[parent] + 1
        tokens, parents = torch.tensor([root, *self.tokens]), torch.tensor([-1, *self.parents])
        return TokenTree(tokens, parents, torch.from_numpy(depth), torch.from_numpy(above))


def guess(
    places: Sequence[Place], nodes: int, least: float, rates: Sequence[float], depth: int
) -> Guess:
    """The likeliest continuations of some places.

    nodes: the most of them. least: of a path's chance. rates: chance that one of a node's children
    is right, by the length of the match above it; the last one is for all longer ones. depth: the
    deepest node.
    """
    # 1. The root, which every place reaches.
    if not places:
        return Guess()
    length, longest = max(place.length for place in places), len(rates) - 1
    made = Guess(length)
    levels = [0]  # depth of each node
    reached = [(place.tokens, place.next) for place in places]
    waiting: list[tuple[float, int, int, int, float, list[tuple[Sequence[int], int]]]] = []
    order = count()  # of equal chances the first wins

    def add_children(node: int, reach: float, ends: list[tuple[Sequence[int], int]]) -> None:
        by_token: dict[int, list[tuple[Sequence[int], int]]] = {}
        for tokens, at in ends:
            if at < len(tokens) and tokens[at] != END:
                by_token.setdefault(tokens[at], []).append((tokens, at + 1))
        rate = rates[min(length + levels[node], longest)]
        for token, below in by_token.items():
            share = len(below) / len(ends)
            if (chance := reach * share * rate) >= least:
                heappush(waiting, (-chance, next(order), node, token, share, below))

    # 2. The likeliest node of all that wait, and its children in turn.
    add_children(0, 1.0, reached)
    while waiting and len(made.tokens) < nodes:
        negative, _, parent, token, share, below = heappop(waiting)
        made.tokens.append(token)
        made.parents.append(parent)
        made.shares.append(share)
        made.chances.append(share * rates[min(length + levels[parent], longest)])
        made.score -= negative
        levels.append(levels[parent] + 1)
        if levels[-1] < depth:
            add_children(len(made.tokens), -negative, below)
    return made
