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


def part(
    tree: TokenTree, pace: CostModel, known: np.ndarray | None = None
) -> tuple[TokenTree, np.ndarray]:
    """The tree of the nodes worth their time in the forward, and their probabilities [M].

    A tree with extra rows stays whole. It tells the cost model what this cycle's tree brings. tree: on the host,
    without draft distributions. known: [N] Pr(a node is accepted | its parent is), from a drafter that
    learns them itself; None: by rank.
    """
    # 1. The probability that each node is reached.
    parents = tree.parents.numpy()
    chances = of_children(parents) if known is None else known
    believed = chances
    if known is None:
        trust = pace.by_law.factors[np.minimum(parents, 1), (chances < RATES[0]).astype(int)]
        believed = (chances * trust).clip(max=CERTAIN)
    reach = reached(parents, believed)

    # 2. The most likely nodes, at the size that brings the most tokens a second.
    nodes = size = len(reach)
    order = np.argsort(-reach[1:], kind="stable") + 1  # a parent stands before its children
    if not tree.rows:
        size, _ = best_size(reach[order], pace.forward, pace.plain)
        if known is None and size == 1 and nodes > 1 and pace.trying:
            size = 2
    kept = np.sort(np.concatenate([[0], order[: size - 1]]))
    shorter = tree if size == nodes else selected(tree, kept)

    # 3. Predict what they bring; of known probabilities there is nothing to learn.
    if known is not None:
        pace.prediction = None
    elif size > 1 or tree.rows:
        rows = len(tree.rows.tokens) if tree.rows else 0
        cost = float(pace.cost.seconds(size + rows, 0))
        pace.predict(Prediction(cost, shorter.parents.numpy(), chances[kept]), pace.by_law)
    return shorter, chances[kept]


def reached(parents: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """[N] Pr(a node is reached), of Pr(it is accepted | its parent is). parents: [N]."""
    reach = chances.copy()
    reach[0] = 1.0
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        reach[node] *= reach[parent]
    return reach


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
