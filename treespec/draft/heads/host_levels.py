"""Drafts the levels of B sequences on a CPU with an EAGLE head, a level by one C call.

`EagleProposer` drafts the same without it, on any device. `find_head_step` says for which heads there is a call.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.drafter import Frontiers
from treespec.draft.heads.base import WaitingPairs
from treespec.kernels.head_step import OwnProducts
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import read_bits_on_host
from treespec.model.cpu.head_step import HeadStep


@lru_cache
def list_mask_numbers(dtype: torch.dtype) -> np.ndarray:
    """Returns [2] the numbers of an additive mask in `dtype`, hidden and seen, as integers with the same bits."""
    return read_bits_on_host(torch.tensor([torch.finfo(dtype).min, 0], dtype=dtype, device="cpu"))


@lru_cache(64)
def build_causal_mask(count: int, dtype: torch.dtype) -> np.ndarray:
    """Returns [count, count] additive: a pair sees the pairs up to its own."""
    return list_mask_numbers(dtype)[np.tri(count, dtype=int)]


@lru_cache(64)
def count_from_zero(count: int) -> np.ndarray:
    """Returns [count] int64: 0, 1, …"""
    return np.arange(count)


def mask_committed_columns(lengths: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns [B, 1, U] additive: the columns that hold each sequence, from the end of the shortest one on.

    lengths: [B] committed positions. Sequences of 3, 1 and 2 positions; all have the first column, which is left out:

        first     x x
        second    . .
        third     x .
    """
    numbers = list_mask_numbers(dtype)
    if len(lengths) == 1:
        return np.empty((1, 1, 0), dtype=numbers.dtype)
    columns = np.arange(lengths.min(), lengths.max())
    return numbers[(columns < lengths[:, None, None]).astype(int)]


def extend_mask(above: np.ndarray, parents: Sequence[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """Returns [B, F, U + F] additive: what each node of a level sees in the columns so far and those of this level.

    A node sees what its parent sees, and itself. Level 1 is a b, level 2 is c d e; c and d are below a:

        columns    a b        columns    a b | c d e
        a          x .        c          x . | x . .
        b          . x        d          x . | . x .
                              e          . x | . . x

    above: [B, M, U] of the level above. parents: of each text [at most F] the row of each node's parent there.
    """
    hidden, seen = list_mask_numbers(dtype)
    count = max(map(len, parents))
    earlier = above.shape[2]
    nodes = count_from_zero(count)
    mask = np.full((len(parents), count, earlier + count), hidden)
    for row, row_parents in enumerate(parents):
        mask[row, : len(row_parents), :earlier] = above[row, row_parents]
    mask[:, nodes, earlier + nodes] = seen
    return mask


class SeenColumns(NamedTuple):
    """What the nodes of a step see.

    Attributes:
        mask: [B, F, U] additive, of the last U columns; all nodes see the columns before them, from `first` on.
        first: the first column that a node sees.
    """

    mask: np.ndarray
    first: int


def apply_window(
    mask: np.ndarray, end: int, positions: np.ndarray, window: int | None, dtype: torch.dtype
) -> SeenColumns:
    """Leaves each node the last `window` columns of those that it sees; None: all of them.

    A window of 3. Both nodes stand at position 4, behind columns 0 to 3, and see themselves. No column needs a mask but
    the nodes' own:

        columns    0 1 2 3 | 4 5
        a          . . x x | x .
        b          . . x x | . x

    Nodes at several positions have several first columns. Then the mask begins with the lowest one.

    Args:
        mask: [B, F, U] additive, of the last U columns; all nodes see the columns before them.
        end: number of all columns.
        positions: int64, of the nodes.
        window: number of positions that a node sees, its own included.
        dtype: of the mask.
    """
    if window is None:
        return SeenColumns(mask, 0)
    numbers = positions.tolist()
    highest = max(numbers)
    if highest < window:
        return SeenColumns(mask, 0)

    # 1. Columns before the first of all nodes are left out.
    free = end - mask.shape[2]
    first = min(max(0, min(numbers) + 1 - window), free)
    if highest - first < window:
        return SeenColumns(mask, first)

    # 2. The others are hidden from nodes that see too many columns after them.
    hidden, seen = list_mask_numbers(dtype)
    texts, nodes, _ = mask.shape
    mask = np.concatenate([np.full((texts, nodes, free - first), seen), mask], axis=2)
    numbers = (mask == seen).cumsum(axis=2)  # the first column that a node sees has number 1
    mask[numbers <= numbers[..., -1:] - window] = hidden
    return SeenColumns(mask, first)


def list_starts(counts: Sequence[int]) -> np.ndarray:
    """Returns [B + 1] int64: the first node of each text, then the number of all nodes. counts: nodes of each text."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


@final
class HostLevels:
    """The levels of a cycle's trees, in the columns after the sequences' pairs.

    Attributes:
        step: the head's step.
        cache: of the head's only layer.
        table: [2, positions, R] rotary angles.
        vocabulary: [N] the target's token for each draft token, before those of `own`; None: all of them.
        own: the output layers of each text's own draft tokens; None: no text has any.
        fuse: projects the target's features [n, F] to the features [n, H] of a step.
        states: [R, H] of the present frontiers, one after the other.
        starts: [B + 1] int64, the first row of each frontier, then R.
        mask: [B, F, U] additive, of the last U columns, for each frontier node.
        positions: [B] int64, of the next level.
    """

    states: Tensor
    starts: np.ndarray
    mask: np.ndarray
    positions: np.ndarray

    def __init__(
        self,
        step: HeadStep,
        cache: TreeCache,
        table: Tensor,
        vocabulary: Tensor | None,
        fuse: Callable[[Tensor], Tensor],
        own: OwnProducts | None = None,
    ) -> None:
        self.step = step
        self.cache = cache
        self.table = table
        self.vocabulary = vocabulary
        self.fuse = fuse
        self.own = own

    def read_pairs(self, pairs: Sequence[WaitingPairs]) -> list[Tensor]:
        """Reads new pairs of each sequence. Returns [1, N] draft logits of each root's children."""
        # 1. The pairs of a sequence are a chain after its earlier ones. Levels of the last cycle are dropped.
        cache = self.cache
        cache.write_after(0)
        dtype = self.step.dtype
        batch = len(pairs)
        lengths = np.array(cache.lengths)
        counts = list(map(len, pairs))
        starts = list_starts(counts)
        most_pairs = max(counts)
        mask = build_causal_mask(most_pairs, dtype)[None]
        if batch > 1:
            committed = mask_committed_columns(lengths, dtype)
            parts = [committed.repeat(most_pairs, axis=1), mask.repeat(batch, axis=0)]
            mask = np.concatenate(parts, axis=2)
        numbers = count_from_zero(int(starts[-1]))
        positions = numbers + (lengths - starts[:-1]).repeat(counts)
        mask, first = self.apply_window(mask, positions)

        # 2. The step.
        output = self.step.run(
            tokens=join_rows([row.tokens for row in pairs]),
            vocabulary=None,
            features=self.fuse(join_rows([row.features for row in pairs])),
            parents=numbers,
            positions=positions,
            starts=starts,
            table=self.table,
            mask=mask,
            store=cache.tree_layers[0],
            drafted=starts[1:] - 1,
            first=first,
            own=self.own,
        )

        # 3. They stay in the cache; the roots are the frontiers.
        cache.commit([range(count) for count in counts])
        self.positions = lengths + counts
        self.mask = mask_committed_columns(self.positions, dtype)
        self.starts = count_from_zero(batch + 1)
        self.states = output.drafted_states
        return list(output.logits.split(1))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        """Drafts a level. Returns [F, N] draft logits for each sequence."""
        # 1. A node sees what its parent sees, and itself. Trees that grow together have one joint frontier.
        tokens, parents, sizes = flatten_frontiers(frontiers)
        counts = list(map(len, parents))
        self.mask = extend_mask(self.mask, parents, self.step.dtype)
        above = [first + rows for first, rows in zip(self.starts, parents, strict=False)]

        # 2. The step. Its columns stay in the cache until the next cycle.
        store = self.cache.tree_layers[0]
        starts = list_starts(counts)
        mask, first = self.apply_window(self.mask, self.positions)
        output = self.step.run(
            tokens=tokens,
            vocabulary=self.vocabulary,
            features=self.states,
            parents=np.concatenate(above),
            positions=self.positions.repeat(counts),
            starts=starts,
            table=self.table,
            mask=mask,
            store=store,
            drafted=count_from_zero(len(tokens)),
            first=first,
            own=self.own,
        )
        store.advance(max(counts))
        self.states = output.states
        self.starts = starts
        self.positions = self.positions + 1
        return list(output.logits.split(sizes))

    def apply_window(self, mask: np.ndarray, positions: np.ndarray) -> SeenColumns:
        """As the function, for nodes in the next columns of the cache. mask: [B, F, U]."""
        end = self.cache.tree_layers[0].length + mask.shape[1]
        return apply_window(mask, end, positions, self.step.window, self.step.dtype)


def join_rows(rows: Sequence[Tensor]) -> Tensor:
    """Returns the rows [n, ...] of all sequences, one after the other. Those of a single one are not copied."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat(list(rows))


def flatten_frontiers(frontiers: Frontiers) -> tuple[Tensor, list[np.ndarray], list[int]]:
    """Returns the tokens of all frontiers [R], the parents' rows of each sequence, and the nodes of each frontier.

    A batch's joint frontier [B, F] counts as one frontier of B F nodes, of B sequences.
    """
    first = frontiers[0]
    if first and first.tokens.dim() == 2:
        return first.tokens.flatten(), list(first.parent_rows.numpy()), [first.tokens.numel()]
    tokens = []
    parents = []
    for frontier in frontiers:
        if frontier is None:
            parents.append(count_from_zero(0))
            continue
        tokens.append(frontier.tokens)
        parents.append(frontier.parent_rows.numpy())
    return join_rows(tokens), parents, list(map(len, parents))
