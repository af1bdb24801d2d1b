"""Keeps the best of all candidates of a ranked tree: on any device, and for one tree on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    Column 0 is the root; then come the candidates level by level. They are plain numbers: of so few, numpy is slower.

    Attributes:
        tokens: of each candidate.
        scores: of each candidate.
        parents: the column of each candidate's parent.
    """

    tokens: list[int]
    scores: list[float]
    parents: list[int]


@dataclass(frozen=True)
class RankedTree:
    """A tree of the best candidates.

    Attributes:
        tree: its N nodes, the best first below the root.
        parents: the parent of each node, -1 for the root.
        columns: the column of each node (`CandidateLevel`).
    """

    tree: TokenTree
    parents: list[int]
    columns: list[int]


def select_best_on_host(root: int, levels: Sequence[CandidateLevel], nodes: int) -> RankedTree:
    """Keeps the best candidates, as `select_best_tree`, for one tree on a CPU.

    Its example: c and d are below b, e and f below a, and all candidates are ranked b c a d e f.

        column            0  1 2  3 4 5 6          kept      0 2 3 1    columns, the best first: r b c a
        token             r  a b  c d e f          parent    . 0 2 0    column of each parent
        parent            .  0 0  2 2 1 1          node     -1 0 1 0    its number among the kept
        number among all  0  3 1  2 4 5 6

    root: its token. nodes: N, the root included.
    """
    # 1. All columns.
    tokens = [root]
    parent_columns = [0]
    depths = [0]
    scores = list[float]()
    for depth, level in enumerate(levels, start=1):
        tokens += level.tokens
        parent_columns += level.parents
        depths += [depth] * len(level.tokens)
        scores += level.scores

    # 2. Rank the candidates; the root comes first.
    ranked = [0]
    for candidate in rank_descending(scores):
        ranked.append(1 + candidate)
    number_of_column = [0] * len(ranked)
    for number, column in enumerate(ranked):
        number_of_column[column] = number

    # 3. The kept ones.
    columns = ranked[:nodes]
    kept_tokens = [tokens[column] for column in columns]
    kept_depths = [depths[column] for column in columns]
    parents = [number_of_column[parent_columns[column]] for column in columns]
    parents[0] = -1
    facts = torch.tensor([kept_tokens, parents, kept_depths], dtype=torch.int64, device="cpu")
    tree = TokenTree(facts[0], facts[1], facts[2], mark_ancestors(parents))
    return RankedTree(tree, parents, columns)


def rank_descending(scores: Sequence[float]) -> list[int]:
    """Lists the indices of the scores, highest first, in the order of `argsort_descending`.

    NaN comes first, and of equal scores the earlier one.
    """
    places = range(len(scores))
    if math.isnan(sum(scores)):
        return sorted(places, key=lambda place: (not math.isnan(scores[place]), -scores[place]))
    return sorted(places, key=scores.__getitem__, reverse=True)
