"""How much of a tree of given tokens pays: the part that `--verifier auto` lets the target score.

A drafter without a model says nothing of its tokens' chances. So each child is given one by its place among its
siblings, and what was accepted so far says how far that is right (`treespec.draft.pace.pace`).
"""

import numpy as np
import torch

from treespec.draft.pace.pace import CERTAIN, Pace, Promise
from treespec.trees.auto import best_size
from treespec.trees.tree import TokenTree

RATES = (0.6, 0.12, 0.06, 0.03)  # of the first, second, … child, at first; later ones have the last
ROWS_BRING = 1.6  # tokens a cycle of drafters with rows of their own (Lookahead in Spec-Bench, 2401.07851)


def part(tree: TokenTree, pace: Pace) -> TokenTree:
    """The nodes that are worth their place in the forward; all of them where the tree brings rows of its own.

    Tells the pace what they promise. tree: on the host, without laws.
    """
    chances = of_children(tree.parents.numpy())
    nodes = len(chances)
    kept = np.arange(nodes)
    if not tree.rows:
        reach = np.ones(nodes)
        trust = pace.by_law.factors
        for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
            believed = chances[node] * trust[int(chances[node] < RATES[0])]
            reach[node] = reach[parent] * min(believed, CERTAIN)
        order = np.argsort(-reach[1:], kind="stable") + 1  # a parent stands before its children
        size, _ = best_size(reach[order], pace.forward, pace.plain)
        if size == 1 and nodes > 1 and pace.trying:
            size = 2
        kept = np.sort(np.concatenate([[0], order[: size - 1]]))
    if len(kept) > 1 or tree.rows:
        shorter = tree if len(kept) == nodes else selected(tree, kept)
        rows = len(tree.rows.tokens) if tree.rows else 0
        cost = pace.cost(len(kept) + rows, 0, 0)
        pace.promise = Promise(pace.by_law, cost, shorter.parents.numpy(), chances[kept])
        return shorter
    return selected(tree, kept)


def of_children(parents: np.ndarray) -> np.ndarray:
    """[N] Pr(a node is accepted | its parent was), by its place among its siblings. parents: [N]."""
    seen: dict[int, int] = {}
    chances = np.ones(len(parents))
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        place = seen.get(parent, 0)
        chances[node] = RATES[min(place, len(RATES) - 1)]
        seen[parent] = place + 1
    return chances


def selected(tree: TokenTree, kept: np.ndarray) -> TokenTree:
    """The tree of these nodes, ascending and closed under parents. kept: [M]."""
    rows = torch.from_numpy(kept)
    number = torch.full_like(tree.parents, -1)
    number[rows] = torch.arange(len(rows))
    parents = number[tree.parents[rows].clamp(min=0)]
    parents[0] = -1
    ancestors = tree.ancestors[rows][:, rows]
    return TokenTree(tree.tokens[rows], parents, tree.depth[rows], ancestors)


def rests(pace: Pace, widest: int) -> bool:
    """Whether a text goes without given tokens this cycle, before they are looked for.

    widest: nodes and rows of a forward, of a drafter that brings rows of its own; 0: it brings none.
    """
    if widest:
        nodes = len(pace.forward)
        wide = float(pace.forward[min(widest, nodes) - 1]) * max(widest / nodes, 1)
        return pace.rests(ROWS_BRING / wide)
    if pace.idle:
        return pace.rests(pace.hope)  # nothing was learned since it was last asked
    chance = min(RATES[0] * float(pace.by_law.factors[0]), CERTAIN)
    tokens = (chance ** np.arange(len(pace.forward))).cumsum()  # of a chain of 0, 1, … given tokens
    seconds = pace.forward + pace.times.resting(0)
    return pace.rests(float((tokens[1:] / seconds[1:]).max()))
