"""A dynamic tree for sampled children: the number of draws at a node is fixed before drawing.

A node costs `price`, in expected tokens. At a node reached with probability r, j sure tokens (the
most likely of q) and m draws are worth r A(j, m) - price (j + m), A their acceptance rate. The node
takes the best pair. The pair may depend on q, on the path and on earlier levels, never on the drawn
tokens. No limit is shared between branches, so verifiers that visit leaves first may have such a
tree too.

    at every node A is .6 by the sure token and .2 by a draw; the price is .15

    root 1 ─┬─ a .2                     a is drawn;          .2 · .6 < .15: a is a leaf
            └─ b .6 ── c .36 ── d .22   b, c, d are sure;    .6 · .2 < .15: b has no draw
                                                             .22 · .6 < .15: d is a leaf
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treespec.trees.ranges import DEPTH, NODES, Range
from treespec.trees.shape import Builder, Growth, Policy

if TYPE_CHECKING:
    import numpy as np

# Tokens a node; a lower price gives trees larger than any machine pays for.
PRICE = Range(least=1e-4, most=1.0)
FIRST = 0.4  # the first price times `nodes`: trees of that size had 0.3 to 0.6 by heads of ours
SPEED = 0.2  # of the logarithm of a tree's size over `nodes`, by which the price follows


def clipped(price: float) -> float:
    """A price in PRICE."""
    return min(max(price, PRICE.least or 0), PRICE.most or 1)


@dataclass(frozen=True)
class SampledTree(Policy):
    """The tree's mean size, or the price of a node. At temperature 0 it is a dynamic tree.

    nodes: mean N, root included.
    depth: the largest number of levels of drafted tokens.
    price: of a node, in expected tokens. Default: it follows the sequence's trees, so that they have
    `nodes` nodes on average.
    """

    name, sure_tokens = "sampled", True
    ranges: ClassVar = {"nodes": NODES, "depth": DEPTH, "price": PRICE}

    nodes: int = 26
    depth: int = 6
    price: float | None = None

    @property
    def first(self) -> float:
        """The price of the first tree."""
        return self.price or clipped(FIRST / self.nodes)

    def grow(self, build: Builder, known: float) -> Growth:
        if build.one_hot:
            return build.ranked(self.depth, topk=10, nodes=self.nodes)
        return build.drawn(self.depth, known)

    def update(self, known: float, drafted: int) -> float:
        if self.price:
            return self.price
        return clipped(known * ((1 + drafted) / self.nodes) ** SPEED)


def allot(
    reach: "np.ndarray", tops: "np.ndarray", draws: "np.ndarray", price: float, even: bool = False
) -> "tuple[np.ndarray, np.ndarray]":
    """The numbers of draws and sure tokens at F nodes, and the reach of their children.

    All arrays lie on the host. For three draws and two sure tokens at one node, J = M = 4:

        place      0     1     2     3      4      5 6 7
        child      draw  draw  draw  sure   sure   none
        reach / r  draws[2, 0:3]     tops[0:2]     0

    reach: [F] Pr(the node is reached).
    tops: [F, J] Pr(the i-th most likely token is output).
    draws: [F, J + 1, M] Pr(the i-th draw is accepted) beside 0 to J sure tokens.
    price: of a node, in expected tokens.
    even: whether every draw of a node has the same chance to be accepted, as with `optimal`.

    Returns [F, 2] int64, the number of draws and the number of sure tokens, and [F, J + M] the
    probabilities that each child is reached.
    """
    import numpy as np  # the names of trees are read without it

    # 1. The worth of each pair (sure tokens, draws), and the best pair of each node.
    (f, j), m = tops.shape, draws.shape[2]
    worth = np.zeros((f, j + 1, m + 1))
    draws.cumsum(-1, out=worth[..., 1:])
    worth[:, 1:] += tops.cumsum(-1)[..., None]
    worth *= reach[:, None, None]
    worth -= (np.arange(j + 1)[:, None] + np.arange(m + 1)) * price
    sure, drawn = np.divmod(worth.reshape(f, -1).argmax(-1)[:, None], m + 1)  # [F, 1] each

    # 2. The acceptance of each draw beside that many sure tokens; the mean of them if even.
    accepted = np.take_along_axis(draws, sure[..., None], 1)[:, 0]  # [F, M]
    if even:
        total = np.take_along_axis(accepted.cumsum(-1), (drawn - 1).clip(0), 1)
        accepted = total / drawn.clip(1)

    # 3. The children's reach: first the draws, then the sure tokens.
    place = np.arange(j + m)
    children = np.take_along_axis(tops, (place - drawn).clip(0, j - 1), 1)
    children[:, :m] = np.where(place[:m] < drawn, accepted, children[:, :m])
    children = children * (reach[:, None] * (place < drawn + sure))
    return np.concatenate([drawn, sure], 1), children
