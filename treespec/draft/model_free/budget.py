"""The part of a given tree that pays. `--verifier auto` lets the target score no more.

A drafter without a model gives its tokens no probabilities. So each child gets a chance by its rank
among its siblings, corrected by what was accepted so far (`treespec.draft.cost.running`).
"""

import numpy as np
import torch

from treespec.draft.cost.model import best_size
from treespec.draft.cost.running import CERTAIN, CostModel, Prediction
from treespec.trees.tree import TokenTree

# Pr(accepted) of the first, second, … child before any feedback; the last is for all further ones.
RATES = (0.6, 0.12, 0.06, 0.03)
# Tokens a cycle of a drafter with rows of its own (Lookahead in Spec-Bench, 2401.07851).
ROWS_BRING = 1.6


def part(tree: TokenTree, pace: CostModel, known: np.ndarray | None = None) -> TokenTree:
    """The tree of the nodes worth their time in the forward. A tree with extra rows stays whole.

    It tells the cost model what this cycle's tree brings. tree: on the host, without laws. known: [N] Pr(a node
    is accepted | its parent is), from a drafter that learns them itself; None: by rank.
    """
    # 1. Keep the nodes likeliest to be reached, at the size that brings the most tokens a second.
    if known is not None:
        pace.prediction = None  # it learns nothing from this cycle
        return likely_part(tree, pace, known)[0]
    chances = of_children(tree.parents.numpy())
    nodes = len(chances)
    kept = np.arange(nodes)
    if not tree.rows:
        reach = np.ones(nodes)
        trust = pace.by_law.factors
        for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
            believed = chances[node] * trust[min(parent, 1), int(chances[node] < RATES[0])]
            reach[node] = reach[parent] * min(believed, CERTAIN)
        order = np.argsort(-reach[1:], kind="stable") + 1  # a parent stands before its children
        size, _ = best_size(reach[order], pace.forward, pace.plain)
        if size == 1 and nodes > 1 and pace.trying:
            size = 2
        kept = np.sort(np.concatenate([[0], order[: size - 1]]))

    # 2. Predict what they bring.
    if len(kept) > 1 or tree.rows:
        shorter = tree if len(kept) == nodes else selected(tree, kept)
        rows = len(tree.rows.tokens) if tree.rows else 0
        cost = float(pace.cost.seconds(len(kept) + rows, 0))
        pace.predict(Prediction(cost, shorter.parents.numpy(), chances[kept]), pace.by_law)
        return shorter
    return selected(tree, kept)


def likely_part(
    tree: TokenTree, pace: CostModel, chances: np.ndarray
) -> tuple[TokenTree, np.ndarray]:
    """`part` by chances [N] that need no correction, and the chances of its nodes."""
    reach = chances.copy()
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        reach[node] *= reach[parent]
    order = np.argsort(-reach[1:], kind="stable") + 1
    size, _ = best_size(reach[order], pace.forward, pace.plain)
    kept = np.sort(np.concatenate([[0], order[: size - 1]]))
    return selected(tree, kept), chances[kept]


def of_children(parents: np.ndarray) -> np.ndarray:
    """[N] Pr(a node is accepted | its parent was), by its rank among its siblings. parents: [N]."""
    seen: dict[int, int] = {}
    chances = np.ones(len(parents))
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        place = seen.get(parent, 0)
        chances[node] = RATES[min(place, len(RATES) - 1)]
        seen[parent] = place + 1
    return chances


def selected(tree: TokenTree, kept: np.ndarray) -> TokenTree:
    """The tree of these nodes. kept: [M] ascending, with every node's parent."""
    rows = torch.from_numpy(kept)
    number = torch.full_like(tree.parents, -1)
    number[rows] = torch.arange(len(rows))
    parents = number[tree.parents[rows].clamp(min=0)]
    parents[0] = -1
    ancestors = tree.ancestors[rows][:, rows]
    return TokenTree(tree.tokens[rows], parents, tree.depth[rows], ancestors)


def rests(pace: CostModel, widest: int) -> bool:
    """Whether a text goes without given tokens this cycle; asked before they are looked for.

    widest: nodes and rows of a forward, for a drafter with rows of its own; 0 for others.
    """
    if widest:
        nodes = len(pace.forward)
        wide = float(pace.forward[min(widest, nodes) - 1]) * max(widest / nodes, 1)
        return pace.pauses(ROWS_BRING / wide)
    first, deeper = (RATES[0] * pace.by_law.factors[:, 0]).clip(max=CERTAIN)
    # [n] tokens that a chain of 0, 1, … given tokens brings.
    tokens = 1 + first * (deeper ** np.arange(len(pace.forward) - 1)).cumsum()
    seconds = pace.forward + pace.cost.overhead[0]
    return pace.pauses(float((tokens / seconds[1:]).max()))
