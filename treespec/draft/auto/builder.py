"""Chooses the tree of each cycle by the expected tokens and the cost of nodes and levels (`treespec.trees.dynamic`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CycleCost, find_best_size, predict_tree_seconds
from treespec.draft.auto.cost_model import (
    MAX_CHILD_PROBABILITY,
    CostModel,
    CostModels,
    Prediction,
    limit_sum,
)
from treespec.draft.best_tree import CandidateLevel, RankedTree
from treespec.draft.builders import CycleBuilder, TreeBuilder
from treespec.draft.calibration import GREEDY_TEMPERATURE, Calibration, find_nearest
from treespec.draft.ranking import HostRanking, ScoredChildren, rank_most_likely
from treespec.draft.tree_assembly import Growth
from treespec.sampling.probs import SamplingParams
from treespec.trees.dynamic import AutoTree
from treespec.trees.layout import get_layout
from treespec.trees.most_likely import estimate_length
from treespec.trees.static import StaticTree

# Grid of the logarithm of the corrections, of first children and of others. Trees are solved only at every fifth
# point: few distinct trees occur, so CUDA graphs are reused.
GRID_STEPS = np.array([0.1, 0.3])
SOLVE_EVERY_POINTS = 5
SLOPE_NODES = 4  # nodes over which the cost of one more is averaged: measured times have steps


@dataclass(frozen=True)
class PlannedTree:
    """A tree fixed before anything is drafted.

    Attributes:
        tree: its shape.
        speed: expected tokens per second.
        prediction: by the rates, without corrections.
    """

    tree: StaticTree
    speed: float
    prediction: Prediction


def plan_tree(model: CostModel, tree: AutoTree) -> PlannedTree:
    """Finds the chain or Sequoia's tree with the most tokens per second, by the corrected rates."""
    grains = np.rint(np.log(model.rate_correction.factors) / GRID_STEPS)  # [2, 2]
    return _plan_at_point(model.cost, model.rates, tuple(grains.flat), tree)


@lru_cache(4096)
def _plan_at_point(
    cost: CycleCost, rates: tuple[float, ...], grains: tuple[float, ...], tree: AutoTree
) -> PlannedTree:
    """Plans the tree for a point of the grid: of the trees solved around it, the fastest at the point.

    grains: the point, in steps of the grid; the four entries of `Correction.factors`.
    """
    point = np.reshape(grains, (2, 2)) / SOLVE_EVERY_POINTS
    corrected = _scale_rates(rates, point)
    root_rates = corrected[0].tolist()
    deeper_rates = corrected[1].tolist()
    (root_first, root_others), (deeper_first, deeper_others) = point.tolist()
    shapes = list[PlannedTree]()
    for root in (math.floor(root_first), math.ceil(root_first)):
        for deeper in (math.floor(deeper_first), math.ceil(deeper_first)):
            solved_point = ((root, round(root_others)), (deeper, round(deeper_others)))
            shape = _solve_at_point(cost, rates, solved_point, tree)
            table = [root_rates]
            while len(table) < shape.tree.max_depth:
                table.append(deeper_rates)
            speed = estimate_length(shape.tree, table) / shape.prediction.seconds
            shapes.append(replace(shape, speed=speed))
    return max(shapes, key=lambda shape: shape.speed)


@lru_cache(1024)
def _solve_at_point(
    cost: CycleCost, rates: tuple[float, ...], point: tuple[tuple[int, int], ...], tree: AutoTree
) -> PlannedTree:
    """Solves for the fastest chain at a point, or the fastest tree if that is faster.

    point: in steps of SOLVE_EVERY_POINTS; rows: the root's children, deeper ones; columns: first children, others.
    """
    # 1. The tree.
    corrected = _scale_rates(rates, np.array(point))
    max_nodes = min(cost.nodes[-1], tree.nodes)
    fastest, speed = cost.find_best_tree(corrected[:, :1], max_nodes, tree.depth)
    if len(rates) > 1:
        branching, branching_speed = cost.find_best_tree(corrected, max_nodes, tree.depth)
        if branching_speed > speed:
            fastest = branching
            speed = branching_speed

    # 2. Its prediction.
    parents = get_layout(fastest, torch.device("cpu")).parents.tolist()
    predicted = [1.0]
    for path in fastest.paths[1:]:
        predicted.append(rates[path[-1]])
    inner = len(set(parents)) - 1
    seconds = float(cost.predict_cycle(fastest.size, fastest.max_depth, inner))
    return PlannedTree(fastest, speed, Prediction(seconds, parents, predicted))


def _scale_rates(rates: tuple[float, ...], point: np.ndarray) -> np.ndarray:
    """Returns [2, K] the rates at a point, of the root's children and of deeper ones.

    point: [2, 2], as in `_solve_at_point`.
    """
    factors = np.exp(GRID_STEPS * SOLVE_EVERY_POINTS * point)
    is_other = np.arange(len(rates)).clip(max=1)
    scaled = np.array(rates) * factors[:, is_other]
    return np.array([limit_sum(row) for row in scaled.tolist()])


class CostAwareRanking(HostRanking):
    """Ranks nodes by expected tokens and their cost: it expands nodes worth their time, then keeps the best size.

    The score of a node is Pr(the target chooses every token of its path).

    Attributes:
        model: the cost model of the sequence.
        params: turn draft logits into the distribution that predicts.
        calibration: the head's; None: it has none.
        predicted: for each level, by expanded node: Pr(a child is accepted | its parent is), uncorrected.
        top_sum: sum of the most likely child's probability over all levels, the first rate included.
    """

    def __init__(
        self,
        tree: AutoTree,
        model: CostModel,
        params: SamplingParams,
        calibration: Calibration | None,
    ) -> None:
        super().__init__(tree.depth, tree.topk, nodes=1)
        self.model = model
        self.params = params
        self.calibration = calibration
        self.forward = model.cost.forward_prices[: tree.nodes]
        if model.cost.batch > 1:
            sizes = np.arange(1, len(self.forward) + 1)
            self.forward = model.cost.compute_forward_price(sizes, model.mean_nodes).tolist()
        self.predicted = list[list[list[float]]]()
        self.top_sum = model.rates[0]

    def score_children(
        self, above: list[float] | None, logits: Tensor, depth: int
    ) -> ScoredChildren:
        # 1. Pr(a child is accepted | its parent is).
        best, tokens = rank_most_likely(logits, self.params, min(self.topk, logits.shape[-1]))
        predicted = best.tolist()
        if self.calibration and self.params.greedy:
            predicted = [self.calibration.predict_certain_choice(row, depth) for row in predicted]
        self.predicted.append(predicted)

        # 2. Pr(all of its path is accepted), corrected.
        correction = self.model.logit_correction
        scores = list[float]()
        for node, probabilities in enumerate(predicted):
            reach = 1.0
            if above is not None:
                reach = above[node]
            for probability in correction.correct_predictions(probabilities, depth):
                scores.append(reach * probability)
        return ScoredChildren(tokens.flatten().tolist(), scores)

    def choose_width(self, level: int, levels: list[CandidateLevel]) -> int:
        # 1. The best size of all candidates so far, and the price in tokens of one more node there.
        model = self.model
        cost = model.cost
        rate = max(model.plain, model.speed)  # tokens that a second is worth
        scores = list[float]()
        for candidates in levels:
            scores += candidates.scores
        scores.sort(reverse=True)
        self.nodes = find_best_size(scores, self.forward, rate)
        end = min(self.nodes + SLOPE_NODES, len(self.forward))
        extra_seconds = self.forward[end - 1] - self.forward[self.nodes - 1]
        price = rate * extra_seconds / max(end - self.nodes, 1)
        if model.trying:
            self.nodes = max(self.nodes, 2)

        # 2. Nodes of the last level whose children are likely to be worth their time.
        self.top_sum += self.predicted[-1][0][0]
        next_rate = self.top_sum / (level + 1) * model.logit_correction.factors[1][0]
        levels_left = self.depth - level
        if not levels_left:
            return 0
        best = sorted(levels[-1].scores, reverse=True)[: self.topk]
        child_rate = min(next_rate, MAX_CHILD_PROBABILITY)
        return count_expansions(
            best,
            child_rate,
            price,
            rate * cost.level,
            rate * cost.seconds_per_extra_row,
            levels_left,
        )

    def predict_outcome(self, ranked: RankedTree) -> Prediction:
        """Predicts the outcome of a tree."""
        probabilities = [1.0]  # of the root, and of the candidates level by level
        inner = 0
        for level in self.predicted:
            inner += len(level)
            for row in level:
                probabilities += row
        kept = [probabilities[column] for column in ranked.columns]
        cost = self.model.cost
        nodes = cost.spread_nodes(len(kept), self.model.mean_nodes)
        seconds = predict_tree_seconds(cost, nodes, len(self.predicted), inner)
        return Prediction(seconds, ranked.parents, kept)


def count_expansions(
    reach: Sequence[float], rate: float, price: float, step: float, row: float, levels: int
) -> int:
    """Returns the number of a level's best nodes to expand; 0 ends the tree.

    Below a node of reach r a chain is expected, of reach r·rate, r·rate², …. The number of nodes and levels with
    the largest gain minus cost decides. All costs are in tokens.

    Args:
        reach: Pr(a node is accepted) of each, descending.
        rate: Pr(a child is accepted | its parent is).
        price: of each node of a chain.
        step: of each level.
        row: of each expanded node but the first.
        levels: the largest number of further levels.

        reach .8 .2   rate .7   price .1   step .2    one level of the first node    .56 - .1 - .2         = .26
                                                        two levels of it              .26 + .39 - .1 - .2   = .35
                                                        two levels, the second too    .35 + .14 - .1        = .39
    """
    best_worth = 0.0
    best_count = 0
    worths = [0.0] * levels  # of the nodes so far, by the number of levels
    for count, node_reach in enumerate(reach, start=1):
        if node_reach * rate <= price and count > 1:
            break  # neither this node nor a later one is worth a row
        gain = 0.0
        chain_reach = node_reach
        for level in range(levels):
            chain_reach *= rate
            gain += max(chain_reach - price, 0.0) - row
            if count == 1:
                gain += row - step
            worths[level] += gain
            if worths[level] > best_worth:
                best_worth = worths[level]
                best_count = count
    return best_count


@final
class AutoBuilder(TreeBuilder):
    """Builds the trees of `auto`: chosen level by level on a CPU, of a fixed shape on an accelerator.

    Attributes:
        models: the cost models of the sequence; None before the first cycle.
        shape: the best tree of fixed shape; on a CPU that of the first cycle, which gives the first estimate of
            the speed.
        by_level: whether the present cycle's tree is chosen level by level. Not on an accelerator: the host would
            wait for each level.
    """

    policy: AutoTree
    models: CostModels | None = None
    shape: PlannedTree
    by_level: bool = True

    @property
    def seconds(self) -> float:
        assert self.models
        return self.models.current.cycle_seconds

    def predict_gain(
        self, params: SamplingParams, batch: int = 1, on_cpu: bool = True, length: float = 0.0
    ) -> float:
        self.by_level = on_cpu
        if not self.models:
            assert self.costs
            rates = None
            if self.calibration and self.calibration.rates:
                temperature = max(params.temperature, GREEDY_TEMPERATURE)
                rates = find_nearest(self.calibration.rates, temperature)
            self.models = CostModels(self.costs, rates)
        model = self.models.select_for_batch(batch, length)
        if not self.by_level or not model.seconds:
            self.shape = plan_tree(model, self.policy)
            model.start(self.shape.speed)
        speed = model.speed
        if not self.by_level:
            speed = self.shape.speed
        return speed / model.plain

    def should_skip_cycle(self, gain: float) -> bool:
        """Whether no tree is expected to be faster than one-token decoding, and none is tried."""
        assert self.models
        model = self.models.current
        return model.should_skip_cycle(gain * model.plain)

    def pass_cycle(self) -> None:
        if self.models:
            self.models.current.idle += 1

    def build_graph_key(self) -> StaticTree | None:
        assert self.models
        model = self.models.current
        if self.by_level:
            return None
        model.predict(self.shape.prediction, model.rate_correction)
        return self.shape.tree

    def grow_shape(self, cycle: CycleBuilder) -> Growth:
        """Grows the most likely tokens level by level, or a tree of fixed shape (`by_level`)."""
        assert self.models
        model = self.models.current
        shape = self.build_graph_key()
        if shape:
            return (yield from cycle.grow_fixed(shape))
        ranking = CostAwareRanking(self.policy, model, cycle.params, self.calibration)
        ranked = yield from ranking.grow(cycle.root, cycle.logits)
        model.predict(ranking.predict_outcome(ranked), model.logit_correction)
        return ranked.tree

    def update(self, path: Sequence[int]) -> None:
        if self.models:
            self.models.current.update(path)
