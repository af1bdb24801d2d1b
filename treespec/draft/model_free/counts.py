"""Continuations of a match, as a tree scored by their counts (SuffixDecoding, 2411.04975).

A node's share is the number of places that continue with its token, over those that reach its
parent. The most likely paths become the tree:

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

    def tree(self, root: int) -> TokenTree:
        """On the host, without draft distributions."""
        nodes = 1 + len(self.tokens)
        above, depth = np.eye(nodes, dtype=bool), np.zeros(nodes, dtype=np.int64)
        for node, parent in enumerate(self.parents, start=1):
            above[node] |= above[parent]
            depth[node] = depth[parent] + 1
        tokens, parents = torch.tensor([root, *self.tokens]), torch.tensor([-1, *self.parents])
        return TokenTree(tokens, parents, torch.from_numpy(depth), torch.from_numpy(above))


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
