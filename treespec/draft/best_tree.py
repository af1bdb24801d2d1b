"""Keeps the best of all candidates of a ranked tree: on any device, and for one tree on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from treespec.trees.mask import build_ancestor_mask, mark_ancestors
from treespec.trees.tree import TokenTree, argsort_descending, cache_tensor, to_device


def select_best_tree(
    tokens: Sequence[Tensor], orders: Sequence[Tensor], scores: Sequence[Tensor], nodes: int
) -> TokenTree:
    """Keeps the best candidates and returns their tree. All may be [...] of a batch.

    Column 0 is padding, column 1 the root; then come the candidates level by level, and the orders. Two levels;
    both nodes of the first are expanded, b before a, so c and d are below b:

        column    0 1  2 3  4 5 6 7  8 9          kept      1 3 4 2    columns, the best first: r b c a
        row       0 r  a b  c d e f  1 0          tokens    r b c a    `row` at the kept columns
        link      0 0  0 0  8 8 9 9               slot      0 0 1 0    `row` at `link`: the parent's slot
        first     0 0  1 1  2 2 2 2               parent    0 1 3 1    its column: `first` + slot
                                                  node     -1 0 1 0    its number among the kept

    Nodes are sorted best first, so that `commit` rarely has to copy columns. No child's score is above its
    parent's, and of equal scores the parent comes first; so a kept node's parent is kept.

    Args:
        tokens: [..., M] of the root and of each level.
        orders: [..., F] the slots of the expanded nodes in each level but the last.
        scores: [..., M] of each level.
        nodes: N, the root included.
    """
    # 1. Rank all columns. NaN sorts as the largest: padding comes first, the root second.
    first_scores = scores[0]
    device = tokens[0].device
    *batch, children = first_scores.shape
    padding_and_root = cache_tensor(
        torch.full, (*batch, 2), torch.nan, dtype=first_scores.dtype, device=first_scores.device
    )
    ranked = to_device(argsort_descending(torch.cat([padding_and_root, *scores], -1)), device)
    kept = ranked[..., 1 : nodes + 1]

    # 2. The tables of the figure at the kept columns.
    widths = tuple(order.shape[-1] for order in orders)
    facts = cache_tensor(build_column_facts, widths, children, device)
    column_numbers = facts[4]
    kept_facts = facts[:4, kept]
    kept_depth = kept_facts[0]
    kept_columns_and_links = kept_facts[1:3]
    kept_first = kept_facts[3]

    # 3. The tokens, and each parent: its slot, its column, its number among the kept.
    zero = cache_tensor(torch.zeros, (*batch, 1), dtype=torch.int64, device=device)
    row = torch.cat([zero, *tokens, *orders], -1)
    kept_tokens, parent_slots = row.expand(2, *row.shape).gather(-1, kept_columns_and_links)
    node_of_column = torch.empty_like(ranked).scatter_(-1, ranked, column_numbers.expand_as(ranked))
    parents = node_of_column.gather(-1, kept_first + parent_slots)
    return TokenTree(kept_tokens, parents, kept_depth, build_ancestor_mask(parents))


def build_column_facts(widths: tuple[int, ...], children: int, device: torch.device) -> Tensor:
    """Returns [5, 2 + M] facts of each column of `select_best_tree`, which its figure shows.

    The rows are depth, the column's number, `link`, `first`, and the numbers -1, 0, 1, 2, …

    widths: the number of expanded nodes of each level but the last. children: of each expanded node.
    """
    counts = torch.tensor(
        [2, *(children * width for width in (1, *widths))], dtype=torch.int64, device="cpu"
    )
    column = torch.arange(int(counts.sum()), device="cpu")
    depth = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).clamp_min(1)[depth - 1]
    link = len(column) - 1 + (column - 2) // children
    first[:2] = link[: 2 + children] = 0
    return to_device(torch.stack([depth, column, link, first, column - 1]), device)


@dataclass(frozen=True)
class CandidateLevel:
    """The M candidates of one level of a tree that grows on a CPU.

    Column 0 is the root; then come the candidates level by level.

    Attributes:
        tokens: [M] int64.
        scores: [M] float.
        parents: [M] int64, the column of each candidate's parent.
    """

    tokens: np.ndarray
    scores: np.ndarray
    parents: np.ndarray


@dataclass(frozen=True)
class RankedTree:
    """A tree of the best candidates.

    Attributes:
        tree: its N nodes, the best first below the root.
        parents: [N] the parent of each node, -1 for the root.
        columns: [N] the column of each node (`CandidateLevel`).
    """

    tree: TokenTree
    parents: np.ndarray
    columns: np.ndarray


def select_best_on_host(root: int, levels: Sequence[CandidateLevel], nodes: int) -> RankedTree:
    """Keeps the best candidates, as `select_best_tree`, for one tree on a CPU.

    Its example: c and d are below b, e and f below a, and all candidates are ranked b c a d e f.

        column            0  1 2  3 4 5 6          kept      0 2 3 1    columns, the best first: r b c a
        token             r  a b  c d e f          parent    . 0 2 0    column of each parent
        parent            .  0 0  2 2 1 1          node     -1 0 1 0    its number among the kept
        number among all  0  3 1  2 4 5 6

    root: its token. nodes: N, the root included.
    """
    # 1. Rank the candidates; the root comes first.
    ranked = 1 + rank_descending(np.concatenate([level.scores for level in levels]))
    columns = np.zeros(min(nodes, 1 + len(ranked)), dtype=np.int64)
    columns[1:] = ranked[: nodes - 1]
    number_of_column = np.zeros(1 + len(ranked), dtype=np.int64)
    number_of_column[ranked] = count_from_one(len(ranked))

    # 2. Tokens, parents and depths of the kept ones.
    below_root = columns[1:] - 1
    facts = np.zeros((3, len(columns)), dtype=np.int64)
    tokens, parents, depths = facts
    tokens[0] = root
    tokens[1:] = np.concatenate([level.tokens for level in levels])[below_root]
    parent_columns = np.concatenate([level.parents for level in levels])
    parents[0] = -1
    parents[1:] = number_of_column[parent_columns[below_root]]
    depths[1:] = build_depths(tuple([len(level.tokens) for level in levels]))[below_root]

    # 3. The tensors share the memory of the arrays.
    tensors = torch.from_numpy(facts)
    ancestors = mark_ancestors(parents.tolist())
    return RankedTree(TokenTree(tensors[0], tensors[1], tensors[2], ancestors), parents, columns)


def rank_descending(scores: np.ndarray) -> np.ndarray:
    """Returns [M] the indices of the scores, highest first, in the order of `argsort_descending`.

    NaN comes first, and of equal scores the earlier one: a stable ascending sort of the reversed scores, reversed.
    """
    return len(scores) - 1 - scores[::-1].argsort(kind="stable")[::-1]


@lru_cache(1024)
def count_from_one(count: int) -> np.ndarray:
    """Returns [count] int64: 1, 2, 3, …"""
    return np.arange(1, count + 1)


@lru_cache(1024)
def build_depths(counts: tuple[int, ...]) -> np.ndarray:
    """Returns the depth of each candidate. counts: candidates of each level."""
    return np.arange(1, len(counts) + 1).repeat(counts)
