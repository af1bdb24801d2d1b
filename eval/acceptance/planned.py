"""Compute τ of trees that the draft shapes again after each token of a text, before anything is drawn (`ddtree`).

Such a tree is a function of the text. So it is followed as a tree of fixed shape, at the tokens that have this shape:

    token of the text      a    b    c    d          the trees of a and c are equal
    its tree               1    2    1    3          three trees, followed at 2, 1 and 1 tokens
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CycleCost
from treespec.draft.builders import CycleBuilder
from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.path_probability import build_pair, find_inner_nodes, follow_pairs
from treespec.eval.intervals import Array
from treespec.sampling.probs import SamplingParams
from treespec.trees.shape import Growth, Policy
from treespec.trees.static import StaticTree
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Planned:
    """A verifier on a tree whose shape the draft's levels fix before anything is drawn.

    Attributes:
        verifier: as `--verifier` names it.
        shape: as `--tree` names the tree.
        scheme: makes the draws.
        tree: the tree policy.
    """

    verifier: str
    shape: str
    scheme: Scheme
    tree: Policy

    answers = 0  # its figures follow given texts
    fixed = None

    def plan_trees(self, levels: Sequence[Tensor], params: SamplingParams) -> list[StaticTree]:
        """Plan the tree of a cycle after each token of a text, as the real loop does.

        levels: [n, N] draft logits of each level, as they are predicted before anything is drawn.
        """
        logits = torch.stack(list(levels), 1)
        return [self.plan_tree(row, params) for row in logits]

    def plan_tree(self, levels: Tensor, params: SamplingParams) -> StaticTree:
        """Plan the tree of one cycle. levels: [D, N] draft logits."""
        root = torch.zeros(1, dtype=torch.int64, device="cpu")
        planner = ShapePlanner(
            root, levels[:1], params, torch.Generator(), self.scheme, ahead=lambda: levels
        )
        growth: Any = self.tree.grow(planner)
        answer = None
        while True:
            try:
                answer = growth.send(answer)
            except StopIteration as end:
                return cast(StaticTree, end.value)


class ShapePlanner(CycleBuilder):
    """Takes a policy up to the shape of its tree, and draws nothing."""

    def grow_fixed(self, shape: StaticTree) -> Growth:
        yield from ()
        return cast(Any, shape)


@dataclass(frozen=True)
class PlannedCycles:
    """The cycles of a text with a planned tree, one for each of its n tokens.

    Attributes:
        trees: of each cycle.
        kept: R [n, D + 1] of each (`treespec.eval.acceptance.path_probability`); 0 beyond the depth of its tree.
    """

    trees: Sequence[StaticTree]
    kept: Tensor

    @property
    def sizes(self) -> Array:
        """[n] nodes of each tree."""
        return np.array([tree.size for tree in self.trees], dtype=np.float64)

    def predict_seconds(self, costs: Mapping[int, CycleCost]) -> Array:
        """Predict the seconds [B, n] of each cycle. costs: batch size -> cost model."""
        seconds = []
        for cost in costs.values():
            seconds.append([predict_seconds(tree, cost) for tree in self.trees])
        return np.array(seconds, dtype=np.float64)


def predict_seconds(tree: StaticTree, cost: CycleCost) -> float:
    """Predict the seconds of a cycle with a tree."""
    return float(cost.predict_cycle(tree.size, tree.max_depth, len(find_inner_nodes(tree))))


def follow_planned(
    pair: Planned, trees: Sequence[StaticTree], steps: Iterable[tuple[Nodes, Nodes]]
) -> PlannedCycles:
    """Follow a text of n tokens down the trees that were planned after each of them, above temperature 0.

    steps: as for `follow_pairs`.
    """
    # 1. The tokens that have a tree in common.
    rows_by_tree: dict[StaticTree, list[int]] = {}
    for row, tree in enumerate(trees):
        rows_by_tree.setdefault(tree, []).append(row)

    # 2. R at these tokens.
    levels = list(steps)
    kept = torch.zeros(len(trees), 1 + len(levels), dtype=torch.float64, device="cpu")
    for tree, rows in rows_by_tree.items():
        places = torch.tensor(rows, dtype=torch.int64, device="cpu")
        fixed = build_pair(pair.verifier, pair.shape, pair.scheme, tree)
        steps_there = [
            (take_rows(nodes, places), take_rows(scored, places)) for nodes, scored in levels
        ]
        (r,) = follow_pairs([fixed], steps_there, greedy=False)
        kept[places, : r.shape[1]] = r
    return PlannedCycles(trees, kept)


def take_rows(nodes: Nodes, rows: Tensor) -> Nodes:
    """Take the nodes of some tokens of the text. rows: [m] int64."""
    return replace(nodes, p=nodes.p[rows], q=nodes.q[rows], y=nodes.y[rows])
