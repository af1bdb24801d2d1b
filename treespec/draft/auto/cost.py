"""The cost model of a cycle as a value: a line of the target's forward, a draft level, an overhead.

Three measured figures; those of a batch follow from them.

    T(n)     12 ms ┤           .─'      a tree of n nodes and d levels takes
             10 ms ┤._____.──''         T(n) + overhead + begin + d · level
                   └──┬───┬────┬──      and brings the expected tokens of its paths
                   n  1   4    8        (`treespec.trees.sequoia`)
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_json
from treespec.trees.sequoia import solve_trees
from treespec.trees.static import StaticTree

COST_FORMAT = 2
LAST_SLOPE_NODES = 1_000_000  # nodes: the line's last slope goes on to here
ROW_PRICE_NODES = 7  # nodes over which the price of one more row of a draft level is averaged


@dataclass(frozen=True)
class CycleCost:
    """Seconds of a cycle's parts, for one batch size; measured for one sequence.

    nodes, forward: T(n) at some tree sizes n (of each sequence), the root included: the target's
    forward, and verification and commit of one-token decoding.
    level: a level of drafts that expands one node. begin: what the first level takes beyond that.
    overhead: what verification and commit of a tree take beyond those of one-token decoding.

    Raises ValueError for numbers that no measurement gives.
    """

    nodes: tuple[int, ...]
    forward: tuple[float, ...]
    level: float = 0.0
    begin: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        seconds = list(self.forward) + [self.level, self.begin, self.overhead]
        is_possible = len(self.nodes) == len(self.forward) > 1
        for number in seconds:
            is_possible = is_possible and 0 <= number < math.inf
        if not is_possible:
            raise ValueError("no such seconds")

    @cached_property
    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        """Corners of T: sizes and seconds, which never fall."""
        sizes = np.array(self.nodes, dtype=float)
        seconds = np.maximum.accumulate(self.forward)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        last = seconds[-1] + slope * (LAST_SLOPE_NODES - sizes[-1])
        return np.append(sizes, LAST_SLOPE_NODES), np.append(seconds, last)

    def interpolate_forward(self, nodes: Any) -> Any:
        """T at any sizes: a float, or an array for an array of them."""
        sizes, seconds = self._line
        return np.interp(nodes, sizes, seconds)

    def predict_forward_seconds(self, most: int) -> np.ndarray:
        """[most] T over 1, 2, … nodes."""
        seconds: np.ndarray = self.interpolate_forward(np.arange(1, most + 1))
        return seconds

    @cached_property
    def seconds_per_extra_row(self) -> float:
        """Seconds of each further node that a draft level expands: as the target's forward grows."""
        one, several = self.interpolate_forward([1, ROW_PRICE_NODES])
        return self.level * float(several / max(one, math.ulp(1.0)) - 1) / (ROW_PRICE_NODES - 1)

    def select_batch_size(self, batch: int) -> "CycleCost":
        """Of several sequences together, by that of one: their forward computes the nodes of all.

        A level of drafts takes longer as the target's forward does; the rest is done for each.
        """
        forward = tuple(self.interpolate_forward(np.multiply(self.nodes, batch)).tolist())
        grows = forward[0] / max(self.forward[0], math.ulp(1.0))
        level = self.level * grows
        begin = self.begin * grows
        return CycleCost(self.nodes, forward, level, begin, batch * self.overhead)

    @property
    def baseline_speed(self) -> float:
        """Tokens per second of one-token decoding."""
        return 1 / max(self.forward[0], math.ulp(1.0))

    def predict_cycle(self, nodes: Any, levels: Any, inner: Any = 0) -> Any:
        """Seconds of a cycle with a tree: a float, or an array if an argument is one.

        levels: 0 where no draft model runs. inner: nodes with children.
        """
        tree = self.interpolate_forward(nodes) + self.overhead * (np.asarray(nodes) > 1)
        drafts = self.level * levels + self.begin * (np.asarray(levels) > 0)
        return tree + drafts + self.seconds_per_extra_row * np.maximum(inner - levels, 0)

    def find_best_tree(self, rates: np.ndarray, nodes: int, depth: int) -> tuple[StaticTree, float]:
        """The tree with the most expected tokens per second, of at most `nodes` and `depth`.

        rates: [2, K] Pr(the k-th child is accepted), of the root's children and of deeper ones.
        Returns the tree and its tokens per second.
        """
        trees = solve_trees(rates[1], nodes, depth, rates[0])
        size = np.arange(2, nodes + 1)
        levels = np.arange(1, depth + 1)[:, None]
        inner = levels
        if rates.shape[1] > 1:
            inner = np.maximum(size / 2, levels)
        speed = trees.tokens[1:, 2:] / self.predict_cycle(size, levels, inner)
        row, column = np.unravel_index(int(speed.argmax()), speed.shape)
        fastest = trees.build_tree(int(size[column]), int(row) + 1)
        return fastest, float(speed[row, column])


def find_best_size(reach: np.ndarray, forward: np.ndarray, rate: float) -> int:
    """The number of nodes, root included, with the largest E - R T.

    reach: [M] Pr(a node is on the accepted path), descending, without the root.
    forward: seconds of the target's forward over 1, 2, … nodes.
    rate: R, tokens a second.
    """
    most = min(len(reach) + 1, len(forward))
    return int((np.append(1.0, reach).cumsum()[:most] - rate * forward[:most]).argmax()) + 1


CostBy = Callable[[int], CycleCost]  # the cost by batch size


def read_cost(file: Path) -> CycleCost | None:
    """The cost of a file; None where it is missing, damaged or not understood."""
    with suppress(InputError, LookupError, TypeError, ValueError):
        fields = read_json(file, "it is measured again", COST_FORMAT)["cost"]
        for name in ("nodes", "forward"):
            fields[name] = tuple(fields[name])
        return CycleCost(**fields)
    return None
