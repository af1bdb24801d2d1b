"""Sequoia's tree (Chen et al. 2024, 2402.12374): the best tree of a size and depth.

rates[r] is the rate at which the r-th child of any node is accepted, counted from 0. The best tree
of n nodes, root included, and of depth at most d yields G(n, d) tokens a cycle (section 3.1):

    G(n, d) = 1 + C(n - 1, 0, d)
    C(m, r, d): the m best nodes below one parent, in the subtree of child r and of later children
    C(0, r, d) = 0
    C(m, r, d) = max over 1 <= j <= m of  rates[r] G(j, d - 1) + C(m - j, r + 1, d)

    rates .6 .3      G(1, d) = 1                G(3, 1) = 1 + .6 + .3
                     G(2, d) = 1 + .6           G(3, 2) = 1 + .6 (1 + .6) = 1.96

The root's children may have rates of their own (`with_root`); the last step alone takes them.

    at the root .5 .4                           G(3, 1) = 1 + .5 + .4        = 1.9
                                                G(3, 2) = max(1.9, 1 + .5 (1 + .6)) = 1.9
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.trees.static import StaticTree, TreeError


@dataclass(frozen=True)
class Best:
    """The solved programme, for every size up to N and every depth up to D.

    tokens: [D + 1, N + 1] G(n, d); -inf where no such tree exists, as for n = 0.
    first: [D + 1, R, N] int64, the nodes of child r's subtree in C(m, r, d).
    deeper: the programme of the nodes below the root; None: this one.
    """

    tokens: Tensor
    first: Tensor
    deeper: "Best | None" = None

    def tree(self, nodes: int, depth: int) -> StaticTree:
        """The tree that attains G(nodes, depth).

        nodes: N, root included. depth: limit on levels of drafted tokens.
        Raises TreeError where no such tree exists.
        """
        if nodes < 2 or not self.tokens[depth, nodes].isfinite():
            children = self.first.shape[1]
            raise TreeError(
                f"no tree of {nodes} nodes is {depth} deep with {children} children a node"
            )
        return StaticTree(tuple(self._below((), nodes, depth)))

    def _below(self, path: tuple[int, ...], nodes: int, depth: int) -> list[tuple[int, ...]]:
        """The paths below a node whose subtree has `nodes` nodes, itself included."""
        paths = []
        rank, left = 0, nodes - 1
        while left:
            here = int(self.first[depth, rank, left])
            child = (*path, rank)
            paths += [child, *(self.deeper or self)._below(child, here, depth - 1)]
            rank += 1
            left -= here
        return paths


def best_trees(rates: Tensor, nodes: int, depth: int) -> Best:
    """Solve the programme for all sizes up to `nodes`, root included, and depths up to `depth`.

    rates: [R] acceptance rates (probabilities) by rank.
    """
    # 1. Start with roots alone.
    rank_rates = rates.double().tolist()
    worth = np.full((depth + 1, nodes + 1), -np.inf)
    worth[:, 1] = 1
    first = np.zeros((depth + 1, len(rank_rates), nodes), dtype=np.int64)

    # 2. Each depth from the one below it.
    for d in range(1, depth + 1):
        after, first[d : d + 1] = _children(rank_rates, worth[d - 1 : d, 1:nodes])
        worth[d, 1:] = 1 + after[0]
    return Best(torch.from_numpy(worth), torch.from_numpy(first))


def with_root(best: Best, rates: Tensor) -> Best:
    """The programme whose root has children of its own rates [R]; below them it is `best`."""
    worth, first = best.tokens.numpy().copy(), best.first.numpy().copy()
    after, first[1:] = _children(rates.double().tolist(), worth[:-1, 1:-1])
    worth[1:, 1:] = 1 + after
    return Best(torch.from_numpy(worth), torch.from_numpy(first), best)


def _children(rates: list[float], below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C(m, 0, d) [D, N] for the depths at hand and m < N, and the nodes of subtrees [D, R, N].

    below: [D, N - 1] G(j, d - 1) for 1 <= j < N.
    """
    # 1. Of m nodes, a subtree of j leaves m - j to the later children: left[m, j].
    depths, nodes = len(below), below.shape[1] + 1
    number = np.arange(1, nodes)
    left = number[:, None] - number
    room = np.where(left < 0, -np.inf, 0.0)
    left = left.clip(min=0)

    # 2. Each rank from the later ones.
    first = np.zeros((depths, len(rates), nodes), dtype=np.int64)
    after = np.full((depths, nodes), -np.inf)  # C(m, r + 1, d)
    after[:, 0] = 0
    for r in range(len(rates) - 1, -1, -1):
        subtree = np.where(below > 0, rates[r] * below.clip(min=0), -np.inf)
        total = subtree[:, None] + after[:, left] + room  # [D, N - 1, N - 1]
        first[:, r, 1:] = total.argmax(2) + 1
        after[:, 1:] = total.max(2)
    return after, first


def sequoia(rates: Tensor, nodes: int, depth: int) -> StaticTree:
    """The best tree of `nodes` nodes, root included, and of depth at most `depth`.

    The tree has fewer nodes where R children a node and `depth` levels hold fewer.
    rates: [R] acceptance rates by rank.
    Raises TreeError for less than two nodes or one level.
    """
    if nodes < 2 or depth < 1:
        raise TreeError(
            f"a tree of {nodes} nodes and depth {depth}: take at least 2 nodes and depth 1"
        )
    best = best_trees(rates, nodes, depth)
    return best.tree(int(best.tokens[depth].isfinite().nonzero().max()), depth)


def best_shape(
    best: Best, forward: Tensor, begin: float, step: float, trust: float = 1.0
) -> tuple[int, int, float]:
    """The nodes and depth with most tokens a second, and those tokens a second (section 3.3).

    The speed is G(n, d) / (T(n) + time to draft d levels).
    forward: [N] seconds T of the target's forward over 1, 2, … nodes.
    begin, step: seconds of the first level of drafts and of each further one.
    trust: accepted tokens for each one that G expects.
    """
    depth, nodes = best.tokens.shape[0] - 1, min(best.tokens.shape[1] - 1, len(forward))
    drafting = begin + step * torch.arange(depth, dtype=torch.float64)
    tokens = 1 + trust * (best.tokens[1:, 2 : nodes + 1] - 1)
    speed = tokens / (forward[1:nodes].double() + drafting[:, None])
    place = int(speed.argmax())
    return place % (nodes - 1) + 2, place // (nodes - 1) + 1, float(speed.max())
