"""Computes Sequoia's tree (Chen et al. 2024, 2402.12374): the best tree of a size and depth.

rates[r] is the acceptance rate of any node's r-th child, counted from 0. The best tree of n nodes, root
included, and of depth at most d yields G(n, d) tokens a cycle (section 3.1):

    G(n, d) = 1 + C(n - 1, 0, d)
    C(m, r, d): accepted tokens of the m best nodes below one parent, in the subtrees of children r, r + 1, …
    C(0, r, d) = 0
    C(m, r, d) = max over 1 <= j <= m of  rates[r] G(j, d - 1) + C(m - j, r + 1, d)

    rates .6 .3      G(1, d) = 1                G(3, 1) = 1 + .6 + .3
                     G(2, d) = 1 + .6           G(3, 2) = 1 + .6 (1 + .6) = 1.96

The root's children may have other rates. Only the last step, from C to G, depends on them.

    at the root .5 .4                           G(3, 1) = 1 + .5 + .4        = 1.9
                                                G(3, 2) = max(1.9, 1 + .5 (1 + .6)) = 1.9
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from treespec.trees.shape import TreeError
from treespec.trees.static import StaticTree


@dataclass(frozen=True)
class SequoiaTable:
    """The solved dynamic programme, for every size up to N and every depth up to D.

    Attributes:
        tokens: [D + 1, N + 1] G(n, d); -inf if no such tree exists, as for n = 0.
        first: [D + 1, R, N] the number of nodes in child r's subtree in C(m, r, d).
        deeper: the table for nodes below the root; None: this one.
    """

    tokens: np.ndarray
    first: np.ndarray
    deeper: "SequoiaTable | None" = None

    def build_tree(self, nodes: int, depth: int) -> StaticTree:
        """Returns the tree that yields G(nodes, depth) tokens, which must be finite. nodes: root included."""
        return StaticTree(tuple(self._list_paths_below((), nodes, depth)))

    def _list_paths_below(
        self, path: tuple[int, ...], nodes: int, depth: int
    ) -> list[tuple[int, ...]]:
        """Lists the paths below the node of `path`. nodes: of its subtree, the node included."""
        deeper = self.deeper
        if deeper is None:
            deeper = self
        paths = []
        rank = 0
        nodes_left = nodes - 1
        while nodes_left:
            subtree_nodes = int(self.first[depth, rank, nodes_left])
            child = path + (rank,)
            paths.append(child)
            paths += deeper._list_paths_below(child, subtree_nodes, depth - 1)
            rank += 1
            nodes_left -= subtree_nodes
        return paths


def solve_trees(
    rates: Sequence[float] | np.ndarray,
    nodes: int,
    depth: int,
    at_root: Sequence[float] | np.ndarray | None = None,
) -> SequoiaTable:
    """Solve the programme for all sizes up to `nodes`, root included, and depths up to `depth`.

    rates: [R] acceptance rates by rank. at_root: [R] those of the root's children; None: `rates`.
    """
    best = _solve_equal_rates(tuple(map(float, rates)), nodes, depth)
    if at_root is None:
        return best
    tokens = best.tokens.copy()
    first = best.first.copy()
    root_children_tokens, first[1:] = _split_children(list(map(float, at_root)), tokens[:-1, 1:-1])
    tokens[1:, 1:] = 1 + root_children_tokens
    return SequoiaTable(tokens, first, best)


@lru_cache(1024)
def _solve_equal_rates(rates: tuple[float, ...], nodes: int, depth: int) -> SequoiaTable:
    """Solves the programme with the same rates at all nodes, each depth d from d - 1."""
    tokens = np.full((depth + 1, nodes + 1), -np.inf)
    tokens[:, 1] = 1
    first = np.zeros((depth + 1, len(rates), nodes), dtype=np.int64)
    for d in range(1, depth + 1):
        children_tokens, first[d : d + 1] = _split_children(rates, tokens[d - 1 : d, 1:nodes])
        tokens[d, 1:] = 1 + children_tokens[0]
    return SequoiaTable(tokens, first)


def _split_children(rates: Sequence[float], below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divides m nodes among a parent's children, for each depth d and each m < N.

    below: [D, N - 1] G(j, d - 1) for 1 <= j < N.
    Returns [D, N] C(m, 0, d), and [D, R, N] the number of nodes in child r's subtree in C(m, r, d).
    """
    # 1. nodes_left[m, j]: if child r's subtree takes j of m nodes, m - j remain for the later children.
    depths = len(below)
    nodes = below.shape[1] + 1
    sizes = np.arange(1, nodes)
    nodes_left = sizes[:, None] - sizes
    penalty = np.where(nodes_left < 0, -np.inf, 0.0)
    nodes_left = nodes_left.clip(min=0)

    # 2. Each rank from the later ones.
    first = np.zeros((depths, len(rates), nodes), dtype=np.int64)
    later_children = np.full((depths, nodes), -np.inf)  # C(m, r + 1, d)
    later_children[:, 0] = 0
    for r in range(len(rates) - 1, -1, -1):
        subtree = np.where(below > 0, rates[r] * below.clip(min=0), -np.inf)
        total = subtree[:, None] + later_children[:, nodes_left] + penalty  # [D, N - 1, N - 1]
        first[:, r, 1:] = total.argmax(2) + 1
        later_children[:, 1:] = total.max(2)
    return later_children, first


def build_sequoia_tree(rates: Sequence[float] | np.ndarray, nodes: int, depth: int) -> StaticTree:
    """Builds the best tree of `nodes` nodes, root included, and of depth at most `depth`.

    It has fewer nodes if a tree with R children per node and `depth` levels cannot hold that many.
    rates: [R] acceptance rates by rank. Raises TreeError for less than two nodes or one level.
    """
    if nodes < 2 or depth < 1:
        raise TreeError(
            f"a tree of {nodes} nodes and depth {depth}: take at least 2 nodes and depth 1"
        )
    best = solve_trees(rates, nodes, depth)
    return best.build_tree(int(np.isfinite(best.tokens[depth]).nonzero()[0].max()), depth)
