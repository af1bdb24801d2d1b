"""`CycleCost`: the seconds of a cycle's parts, measured for one sequence and derived for a batch.

T(n) is the time of the target's forward over a tree of n nodes, interpolated between measured sizes:

    T(n)     12 ms ┤           .─'      a tree of n nodes and d levels takes
             10 ms ┤._____.──''         T(n) + overhead + begin + d · level
                   └──┬───┬────┬──      and brings the expected tokens of its paths
                   n  1   4    8        (`treespec.trees.sequoia`)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_json
from treespec.trees.sequoia import solve_trees
from treespec.trees.static import StaticTree

COST_FORMAT = 2
CONTEXT_TOKENS = 192  # before the tree whose forward is measured
CONTEXT_STEP = 512  # further tokens after which the cost of a longer text is derived again
LAST_SLOPE_NODES = 1_000_000  # nodes up to which T is extrapolated with its last slope
FLAT_RATIO = 1.1  # T(n) / T(1) of the check below which T counts as flat
LARGEST_GIVEN_TREE = 256  # nodes
# By how much drafts must seem faster than one-token decoding. In a batch each sequence's tokens are observed and
# turned into text one after the other, and the forward attends to other texts' columns: the model knows neither.
BATCH_MARGIN = 0.15
ROW_PRICE_NODES = 7  # nodes over which the cost of one more row of a draft level is averaged


@dataclass(frozen=True)
class CycleCost:
    """Seconds of a cycle's parts, for one batch size.

    Attributes:
        nodes: measured tree sizes n of each sequence, the root included.
        forward: T(n) of these sizes: seconds of the target's forward, with verification and commit of
            one-token decoding.
        level: seconds of one draft level that expands one node.
        begin: extra seconds of the first draft level.
        overhead: extra seconds of verification and commit of a tree, compared with one-token decoding.
        context: extra seconds of a forward for each token of the text beyond `CONTEXT_TOKENS`.
        node_context: of them, those of each further node.
        text_level, text_begin: extra seconds of `level` and `begin` for each further sequence of a batch; None:
            they grow as the target's forward does.
        batch: the number of sequences.
        check_ratio: T(n) / T(1) of the trial that later decides whether this cost is still valid; 0: unknown.

    Raises:
        ValueError: a number is negative or not finite, or there are fewer than two sizes.
    """

    nodes: tuple[int, ...]
    forward: tuple[float, ...]
    level: float = 0.0
    begin: float = 0.0
    overhead: float = 0.0
    context: float = 0.0
    node_context: float = 0.0
    text_level: float | None = None
    text_begin: float | None = None
    batch: int = 1
    check_ratio: float = 0.0

    def __post_init__(self) -> None:
        numbers = [*self.forward, self.level, self.begin, self.overhead]
        numbers += [self.context, self.node_context, self.check_ratio]
        numbers += [self.text_level or 0.0, self.text_begin or 0.0]
        is_possible = len(self.nodes) == len(self.forward) > 1
        for number in numbers:
            is_possible = is_possible and 0 <= number < math.inf
        if not is_possible:
            raise ValueError("no such cost")

    @cached_property
    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        """The corners of T: sizes, and seconds, made non-decreasing."""
        sizes = np.array(self.nodes, dtype=float)
        seconds = np.maximum.accumulate(self.forward)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        last_seconds = seconds[-1] + slope * (LAST_SLOPE_NODES - sizes[-1])
        return np.append(sizes, LAST_SLOPE_NODES), np.append(seconds, last_seconds)

    def interpolate_forward(self, nodes: Any) -> Any:
        """Returns T(nodes): a float, or an array for an array of sizes."""
        sizes, seconds = self._line
        return np.interp(nodes, sizes, seconds)

    def spread_nodes(self, nodes: Any, others: float) -> Any:
        """Returns the mean number of nodes of a batch's trees.

        nodes: of one sequence's tree: a number or an array. others: of the tree of each other sequence. Of 4
        sequences one has 5 nodes, each other one 3: 14 nodes, 3.5 on average.
        """
        return others + (nodes - others) / self.batch

    def compute_forward_price(self, nodes: Any, others: float = 1.0) -> Any:
        """Returns the seconds that a forward costs with a tree of `nodes` nodes: a float, or an array as `nodes` is.

        A node delays all sequences of the batch, so its seconds count once for each of them.

        nodes: of one sequence's tree. others: of the tree of each other sequence.
        """
        seconds_of_others = self.interpolate_forward(others)
        seconds = self.interpolate_forward(self.spread_nodes(nodes, others))
        return seconds_of_others + self.batch * (seconds - seconds_of_others)

    @cached_property
    def forward_prices(self) -> list[float]:
        """`compute_forward_price` of 1, 2, … nodes up to the largest measured size, beside roots alone."""
        prices: list[float] = self.compute_forward_price(np.arange(1, self.nodes[-1] + 1)).tolist()
        return prices

    @property
    def least_speed(self) -> float:
        """Tokens per second that drafts must seem to exceed."""
        if self.batch > 1:
            return self.baseline_speed * (1 + BATCH_MARGIN)
        return self.baseline_speed

    @cached_property
    def least_scores(self) -> list[float]:
        """By the number of given draft tokens, from 0: accepted tokens that are worth the time, and no more."""
        scores = (np.array(self.forward_prices) + self.overhead) * self.least_speed - 1
        scores[0] = 0.0
        least_scores: list[float] = scores.tolist()
        return least_scores

    @cached_property
    def fastest_accepted_speed(self) -> float:
        """Tokens per second of a sequence whose given tree is a chain that is all accepted, of the best length."""
        sizes = np.arange(1, LARGEST_GIVEN_TREE + 1)
        seconds = self.compute_forward_price(sizes) + self.overhead
        return float((sizes / seconds).max())

    @cached_property
    def seconds_per_extra_row(self) -> float:
        """Extra seconds for each further node that a draft level expands; it grows as the target's forward does."""
        one_node, several_nodes = self.interpolate_forward([1, ROW_PRICE_NODES])
        ratio = several_nodes / max(one_node, math.ulp(1.0))
        return self.level * float(ratio - 1) / (ROW_PRICE_NODES - 1)

    def scale_forward(self, ratio: float) -> "CycleCost":
        """Returns the cost with another ratio T(n) / T(1) of the check, `ratio`.

        T'(n) = T(1) · (T(n) / T(1)) ^ (log ratio / log check_ratio) is T(n) for the old ratio, and several bends are
        one to the last ratio. A curve that is flat up to the checked size does not bend.
        """
        if min(self.check_ratio, ratio) < FLAT_RATIO:
            return self
        exponent = math.log(ratio) / math.log(self.check_ratio)
        one_node = self.forward[0]
        forward = tuple(one_node * (seconds / one_node) ** exponent for seconds in self.forward)
        return replace(self, forward=forward, check_ratio=ratio)

    def select_batch_size(self, batch: int) -> "CycleCost":
        """Returns the cost of a batch of sequences, derived from the cost of one.

        The target's forward computes the nodes of all sequences. Draft levels take `text_level` and `text_begin`
        longer for each further sequence, or slow down by the same factor as the target's forward. The overhead is
        spent for each sequence.
        """
        forward = tuple(self.interpolate_forward(np.multiply(self.nodes, batch)).tolist())
        if self.text_level is None or self.text_begin is None:
            factor = forward[0] / max(self.forward[0], math.ulp(1.0))
            level = self.level * factor
            begin = self.begin * factor
        else:
            level = self.level + (batch - 1) * self.text_level
            begin = self.begin + (batch - 1) * self.text_begin
        return replace(
            self,
            batch=batch,
            forward=forward,
            level=level,
            begin=begin,
            overhead=batch * self.overhead,
            context=batch * self.context,
            node_context=batch * self.node_context,
        )

    def select_length(self, tokens: float) -> "CycleCost":
        """Returns the cost for texts of that many tokens, in steps of `CONTEXT_STEP`: each node attends to all of them.

        tokens             192 to 703    704 to 1215
        T(n) grows by      0             512 (context + (n - 1) node_context)
        """
        steps = int(max(tokens - CONTEXT_TOKENS, 0) // CONTEXT_STEP)
        if not steps or not self.context:
            return self
        return extend_context(self, steps * CONTEXT_STEP)

    @cached_property
    def baseline_speed(self) -> float:
        """Tokens per second of one-token decoding."""
        return 1 / max(self.forward[0], math.ulp(1.0))

    def predict_cycle(self, nodes: Any, levels: Any, inner: Any = 0) -> Any:
        """Returns the seconds of a cycle with a tree: a float, or an array if an argument is one.

        nodes: of the tree. levels: draft levels; 0 if no draft model runs. inner: nodes with children.
        """
        tree_seconds = self.interpolate_forward(nodes) + self.overhead * (nodes > 1)
        draft_seconds = self.level * levels + self.begin * (levels > 0)
        row_seconds = self.seconds_per_extra_row * np.maximum(inner - levels, 0)
        return tree_seconds + draft_seconds + row_seconds

    def find_best_tree(self, rates: np.ndarray, nodes: int, depth: int) -> tuple[StaticTree, float]:
        """Finds the tree of at most `nodes` nodes and `depth` levels with the most expected tokens per second.

        rates: [2, K] Pr(the k-th child is accepted), first of the root's children, then of deeper ones.
        Returns the tree and its tokens per second.
        """
        trees = solve_trees(rates[1], nodes, depth, rates[0])
        sizes = np.arange(2, nodes + 1)
        levels = np.arange(1, depth + 1)[:, None]
        inner = levels
        if rates.shape[1] > 1:
            inner = np.maximum(sizes / 2, levels)
        speeds = trees.tokens[1:, 2:] / self.predict_cycle(sizes, levels, inner)
        row, column = np.unravel_index(int(speeds.argmax()), speeds.shape)
        fastest = trees.build_tree(int(sizes[column]), int(row) + 1)
        return fastest, float(speeds[row, column])


@lru_cache(256)
def extend_context(cost: CycleCost, tokens: int) -> CycleCost:
    """Returns the cost of texts with that many further tokens."""
    forward = []
    for nodes, seconds in zip(cost.nodes, cost.forward, strict=True):
        per_token = cost.context + (nodes - 1) * cost.node_context
        forward.append(seconds + tokens * per_token)
    return replace(cost, forward=tuple(forward))


@lru_cache(4096)
def predict_tree_seconds(cost: CycleCost, nodes: float, levels: int, inner: int) -> float:
    """Returns `CycleCost.predict_cycle` of one tree. The same few trees come again and again."""
    return float(cost.predict_cycle(nodes, levels, inner))


def find_best_size(reach: Sequence[float], forward: Sequence[float], rate: float) -> int:
    """Returns the number of nodes, root included, with the largest E - R T (`treespec.trees.dynamic.AutoTree`).

    reach: Pr(a node is on the accepted path) of each node but the root, descending.
    forward: seconds of the target's forward over 1, 2, … nodes.
    rate: R, tokens per second.
    """
    expected_tokens = 1.0
    best_gain = expected_tokens - rate * forward[0]
    best_size = 1
    for size, node_reach, seconds in zip(count(2), reach, forward[1:], strict=False):
        expected_tokens += node_reach
        gain = expected_tokens - rate * seconds
        if gain > best_gain:
            best_gain = gain
            best_size = size
    return best_size


CostBy = Callable[[int], CycleCost]  # the cost by batch size


def read_cost(file: Path) -> CycleCost | None:
    """Reads a cost from a file; returns None if it is missing, damaged or of another format."""
    with suppress(InputError, LookupError, TypeError, ValueError):
        fields = read_json(file, "it is measured again", COST_FORMAT)["cost"]
        for name in ("nodes", "forward"):
            fields[name] = tuple(fields[name])
        return CycleCost(**fields)
    return None
