"""A dynamic tree for sampled children: how many draws each node gets is settled before any of them
is made.

A node costs `price`, and what it brings is what the draft laws promise: at a node reached with
probability r, j of the likeliest tokens and m sampled draws are worth r A(j, m) - price (j + m),
and the best pair is taken. The count may depend on q, on the path and on earlier levels, never on
what is drawn; and as no limit is shared between branches, verifiers that visit leaves first may
have such a tree too.

    at every node A is .6 by the top and .2 by a draw, price .15

    root 1 ─┬─ a .2                     a draw; .2 · .6 < .15: a leaf
            └─ b .6 ── c .36 ── d .22   tops; .6 · .2 < .15: no draws; .22 · .6 < .15: a leaf
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treespec.trees.ranges import DEPTH, NODES, Range, outside
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError

LEAST_PRICE = 1e-4  # of a node, in tokens: below it a tree takes more nodes than any pays for


@dataclass(frozen=True)
class SampledTree(Policy):
    """nodes: mean N, root included. depth: limit on levels of drafted tokens.

    price: of a node, in expected tokens.

    price None: the price at which trees have `nodes` nodes on average, by the head's calibration.
    """

    name: ClassVar[str] = "sampled"

    nodes: int = 26
    depth: int = 6
    price: float | None = None

    def __post_init__(self) -> None:
        if wrong := outside(
            self, nodes=NODES, depth=DEPTH, price=Range(least=LEAST_PRICE, most=1.0)
        ):
            raise TreeError(f"sampled tree: {wrong}")

    @property
    def max_depth(self) -> int:
        return self.depth


def allot(
    reach: np.ndarray, tops: np.ndarray, draws: np.ndarray, price: float, even: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The draws and sure tokens of each of F nodes, and Pr(each child is reached).

    It runs on the host.

    reach: [F] Pr(the node is reached).
    tops: [F, J] Pr(the i-th likeliest token is output).
    draws: [F, J + 1, M] Pr(the i-th draw is accepted) beside 0 to J sure tokens.
    price: of a node, in tokens.
    even: whether any draw is accepted as readily as another, as by `optimal`.

    Returns k [F, 2] int64, the numbers of draws and of sure tokens, and [F, J + M] the reach of the
    children: of the draws, then of the sure tokens, then 0.
    """
    (f, j), m = tops.shape, draws.shape[2]
    worth = np.zeros((f, j + 1, m + 1))
    draws.cumsum(-1, out=worth[..., 1:])
    worth[:, 1:] += tops.cumsum(-1)[..., None]
    worth *= reach[:, None, None]
    worth -= (np.arange(j + 1)[:, None] + np.arange(m + 1)) * price
    taken, number = np.divmod(worth.reshape(f, -1).argmax(-1)[:, None], m + 1)
    own = np.take_along_axis(draws, taken[..., None], 1)[:, 0]  # [F, M]
    if even:
        own = np.take_along_axis(own.cumsum(-1), (number - 1).clip(0), 1) / number.clip(1)
    place = np.arange(j + m)
    children = np.take_along_axis(tops, (place - number).clip(0, j - 1), 1)
    children[:, :m] = np.where(place[:m] < number, own, children[:, :m])
    return np.concatenate([number, taken], 1), children * (
        reach[:, None] * (place < number + taken)
    )
