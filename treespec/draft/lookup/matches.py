"""Where the last tokens of a sequence stood before, and the tree of what followed there.

The continuations become a tree scored by their counts (SuffixDecoding, 2411.04975). A node's share is
the number of places that continue with its token, over those that reach its parent. The most likely
paths are kept:

    a b c         root ─┬─ a 3/4 ─┬─ b 2/3 ─── c 2/2
    a b c               │         └─ d 1/3
    a d                 └─ e 1/4
    e
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from treespec.draft.lookup.guess import END_OF_TEXT, Guess


def find_longest_match(
    tokens: np.ndarray, context: np.ndarray, longest: int
) -> tuple[int, np.ndarray]:
    """The length of the context's longest suffix in the tokens, and [M] ascending places after it.

    A token follows at each place. tokens: [T], END after each sequence; the context's own, for one.
    longest: the most tokens to compare. The suffix `c a b` of 3 tokens ends before place 5:

        place      0 1 2 3 4 5 6 7
        tokens     a b c a b c a b
    """
    places = np.flatnonzero(tokens[:-1] == context[-1]) + 1
    length = 1
    places = places[tokens[places] != END_OF_TEXT]
    while len(places) and length < min(longest, len(context)):
        longer = places[places > length]
        longer = longer[tokens[longer - length - 1] == context[-length - 1]]
        if not len(longer):
            break
        places = longer
        length = length + 1
    return length * bool(len(places)), places


def merge_continuations(
    continuations: Sequence[Sequence[int]],
    nodes: int,
    length: int,
    rate: Callable[[int], float],
    least: float,
) -> Guess:
    """The most likely continuations, merged into a tree. Each ends at END, if it holds one.

    nodes: the most of them, without the root. length: tokens of the match that they follow. rate:
    Pr(one of a node's children is right), by the length of the match above it. least: of a path's probability.
    """
    tokens = list[int]()
    parents = list[int]()
    shares = list[float]()
    probabilities = [1.0]
    levels = [0]  # depth of each node
    waiting: list[tuple[float, int, int, int, float, list[Sequence[int]]]] = []
    order = count()  # of equal probabilities the first wins

    def add_children(node: int, reach: float, reached: Sequence[Sequence[int]]) -> None:
        """Candidates below a node that some continuations reach."""
        level = levels[node]
        below = dict[int, list[Sequence[int]]]()
        for line in reached:
            if level < len(line) and line[level] != END_OF_TEXT:
                below.setdefault(line[level], []).append(line)
        right = rate(length + level)
        for token, following in below.items():
            share = len(following) / len(reached)
            probability = reach * share * right
            if probability >= least:
                heappush(waiting, (-probability, next(order), node, token, share, following))

    # The most likely node of all that wait, and its children in turn.
    add_children(0, 1.0, continuations)
    while waiting and len(tokens) < nodes:
        negative, _, parent, token, share, reached = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        levels.append(levels[parent] + 1)
        probabilities.append(share * rate(length + levels[parent]))
        add_children(len(tokens), -negative, reached)
    return Guess(tokens, parents, np.array(probabilities), shares, length)
