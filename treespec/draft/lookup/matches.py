"""Finds earlier occurrences of a sequence's last tokens, and merges their continuations into a tree.

The tree is scored by counts (SuffixDecoding, 2411.04975). A node's share is the number of continuations that go
through it, divided by those that go through its parent. The most likely paths are kept. Four continuations:

    a b c         root ─┬─ a 3/4 ─┬─ b 2/3 ─── c 2/2
    a b c               │         └─ d 1/3
    a d                 └─ e 1/4
    e                                                    five nodes below the root
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from treespec.draft.lookup.guess import END_OF_TEXT, Guess


def find_longest_match(
    tokens: np.ndarray, context: np.ndarray, longest: int
) -> tuple[int, np.ndarray]:
    """Finds the longest suffix of the context that occurs in the tokens with a token after it.

    The context is its own `tokens`, too. Its last three tokens, c a b, occur before slot 5, where c follows. Two
    tokens, a b, also occur before slot 2, but that match is shorter:

        slot       0 1 2 3 4 5 6 7
        tokens     a b c a b c a b
                       └─┴─┴ c a b, before slot 5

    Args:
        tokens: [T] of one or more sequences, with END_OF_TEXT after each of several.
        context: [C] the tokens of the sequence so far.
        longest: the largest length to compare.

    Returns:
        The length of the suffix, 0 without a match, and [M] ascending slots of the tokens after its occurrences.
    """
    ends = (tokens[:-1] == context[-1]).nonzero()[0] + 1
    if not len(ends):
        return 0, ends
    length = 1
    ends = ends[tokens[ends] != END_OF_TEXT]
    while len(ends) and length < min(longest, len(context)):
        longer_ends = ends[ends > length]
        longer_ends = longer_ends[tokens[longer_ends - length - 1] == context[-length - 1]]
        if not len(longer_ends):
            break
        ends = longer_ends
        length = length + 1
    return length * bool(len(ends)), ends


def merge_continuations(
    continuations: Sequence[Sequence[int]],
    nodes: int,
    length: int,
    rate: Callable[[int], float],
    least: float,
) -> Guess:
    """Merges the most likely continuations into a tree.

    Args:
        continuations: the tokens after each occurrence. A continuation ends at END_OF_TEXT, if it holds one.
        nodes: the largest number of nodes below the root.
        length: tokens of the match that the continuations follow.
        rate: returns Pr(one of a node's children is right) for the length of the match above the children.
        least: the smallest probability of a path to keep.
    """
    tokens = list[int]()
    parents = list[int]()
    shares = list[float]()
    probabilities = [1.0]
    depths = [0]  # of each node
    candidates: list[tuple[float, int, int, int, float, list[Sequence[int]]]] = []
    order = count()  # of equal probabilities the first wins

    def add_children(node: int, reach: float, through_node: Sequence[Sequence[int]]) -> None:
        """Make the children of a node candidates. through_node: the continuations that go through it."""
        depth = depths[node]
        by_token = dict[int, list[Sequence[int]]]()
        for line in through_node:
            if depth < len(line) and line[depth] != END_OF_TEXT:
                by_token.setdefault(line[depth], []).append(line)
        hit_rate = rate(length + depth)
        for token, through_child in by_token.items():
            share = len(through_child) / len(through_node)
            probability = reach * share * hit_rate
            if probability >= least:
                entry = (-probability, next(order), node, token, share, through_child)
                heappush(candidates, entry)

    # Add the most likely candidate; its children become candidates.
    add_children(0, 1.0, continuations)
    while candidates and len(tokens) < nodes:
        negative_reach, _, parent, token, share, through_node = heappop(candidates)
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        depths.append(depths[parent] + 1)
        probabilities.append(share * rate(length + depths[parent]))
        add_children(len(tokens), -negative_reach, through_node)
    return Guess(tokens, parents, np.array(probabilities), shares, length)
