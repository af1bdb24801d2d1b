"""Drafts the levels of B sequences on a CPU with an EAGLE head, a level by one C call.

`EagleProposer` drafts the same without it, on any device.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from treespec.draft.drafter import Frontiers, pad_frontiers
from treespec.draft.heads.base import WaitingPairs
from treespec.heads.eagle import EagleHead
from treespec.kernels import ops as kernels
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import view_bits_on_host
from treespec.model.cpu.head_step import HeadStep
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.masks import pad_and_stack
from treespec.model.target import Target
from treespec.trees.tree import build_range


def find_head_step(head: Any, target: Target) -> HeadStep | None:
    """Returns the head's step as one C call; None if it has parts that the call does not compute.

    head: attached to the target. The call computes EAGLE-1's layer, packed for a CPU without hooks.
    """
    # 1. The kind of the head, and its embedding.
    kind = type(head)
    dtype = target.dtype
    if kind is not EagleHead or dtype not in kernels.BFLOAT16_FLAGS:
        return None
    embedding = head.embed_tokens
    if not is_plain_embedding(embedding, dtype) or head.embed_scale != 1:
        return None

    # 2. The decoder layer.
    (layer,) = head.decoder
    if not is_fused(layer):
        return None

    # 3. The products. A head without an output layer has that of the target.
    output = head.lm_head
    if output is None:
        output = target.output_path.find_product(embedding.weight[:1], head.output)
    if not is_packed(head.fc, dtype) or not is_packed(output, dtype):
        return None
    return HeadStep(layer, head.fc, embedding.weight, output)


def is_fused(layer: Any) -> bool:
    """Whether a head's layer runs as one C call, and without a window or hooks."""
    has_fused_forward = "forward" in vars(layer)
    return has_fused_forward and layer.self_attn.window is None and not has_hooks(layer)


def is_packed(product: Any, dtype: torch.dtype) -> bool:
    """Whether a linear layer is packed, for inputs and biases of that dtype, without hooks."""
    if type(product) is not PackedLinear or has_hooks(product):
        return False
    return product.weight.dtype == dtype


def is_plain_embedding(embedding: Any, dtype: torch.dtype) -> bool:
    """Whether an embedding only copies rows of a weight of that dtype in the memory of the CPU."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    weight = embedding.weight
    return weight.is_cpu and weight.is_contiguous() and weight.dtype == dtype


def has_hooks(module: nn.Module) -> bool:
    """Whether code runs before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@lru_cache
def list_mask_numbers(dtype: torch.dtype) -> np.ndarray:
    """Returns [2] the numbers of an additive mask in `dtype`, hidden and seen, as integers with the same bits."""
    return view_bits_on_host(torch.tensor([torch.finfo(dtype).min, 0], dtype=dtype))


@lru_cache(64)
def build_causal_mask(count: int, dtype: torch.dtype) -> np.ndarray:
    """Returns [count, count] additive: a pair sees the pairs up to its own."""
    return list_mask_numbers(dtype)[np.tri(count, dtype=int)]


@lru_cache(64)
def number_nodes(count: int) -> np.ndarray:
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


def extend_mask(above: np.ndarray, parents: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns [B, F, U + F] additive: what each node of a level sees in the columns so far and those of this level.

    A node sees what its parent sees, and itself. Level 1 is a b, level 2 is c d e; c and d are below a:

        columns    a b        columns    a b | c d e
        a          x .        c          x . | x . .
        b          . x        d          x . | . x .
                              e          . x | . . x

    above: [B, M, U] of the level above. parents: [B, F] the row of each node's parent there.
    """
    hidden, seen = list_mask_numbers(dtype)
    batch, count = parents.shape
    earlier = above.shape[2]
    nodes = number_nodes(count)
    mask = np.full((batch, count, earlier + count), hidden)
    mask[:, :, :earlier] = above[number_nodes(batch)[:, None], parents]
    mask[:, nodes, earlier + nodes] = seen
    return mask


@final
class HostLevels:
    """The levels of a cycle's trees, in the columns after the sequences' pairs.

    Attributes:
        step: the head's step.
        cache: of the head's only layer.
        table: [2, positions, R] rotary angles.
        vocabulary: [N] the target's token for each draft token; None: all of them.
        states: [B, F, H] of the present frontiers.
        mask: [B, F, U] additive, of the last U columns, for each frontier node.
        positions: [B, 1] of the next level.
    """

    states: Tensor
    mask: np.ndarray
    positions: np.ndarray

    def __init__(
        self, step: HeadStep, cache: TreeCache, table: Tensor, vocabulary: Tensor | None
    ) -> None:
        self.step = step
        self.cache = cache
        self.table = table
        self.vocabulary = vocabulary

    def read_pairs(self, pairs: Sequence[WaitingPairs]) -> list[Tensor]:
        """Reads new pairs of each sequence. Returns [1, N] draft logits of each root's children."""
        # 1. The pairs are a chain after the earlier ones. Sequences with fewer are padded.
        cache = self.cache
        dtype = self.step.dtype
        lengths = np.array(cache.lengths)
        counts = np.array(list(map(len, pairs)))
        tokens = pad_and_stack([row.tokens for row in pairs])
        batch, count = tokens.shape
        mask = build_causal_mask(count, dtype)[None]
        if batch > 1:
            committed = mask_committed_columns(lengths, dtype)
            parts = [committed.repeat(count, axis=1), mask.repeat(batch, axis=0)]
            mask = np.concatenate(parts, axis=2)

        # 2. The step.
        cache.write_after(0)  # drops the levels of the last cycle
        output = self.step.run(
            tokens=tokens,
            vocabulary=None,
            features=pad_and_stack([row.features for row in pairs]),
            parents=build_range(count, tokens.device).expand(batch, -1),
            positions=lengths[:, None] + number_nodes(count),
            table=self.table,
            mask=mask,
            store=cache.tree_layers[0],
            drafted=count * number_nodes(batch) + counts - 1,
        )

        # 3. They stay in the cache; the roots are the frontier.
        cache.commit([range(read) for read in counts.tolist()])
        lengths += counts
        self.positions = lengths[:, None]
        self.mask = mask_committed_columns(lengths, dtype)
        self.states = output.drafted_states[:, None]
        return list(output.logits.split(1))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        """Drafts a level. Returns [F, N] draft logits for each sequence."""
        # 1. A node sees what its parent sees, and itself.
        tokens, parents, sizes = pad_frontiers(frontiers, self.states.device)
        batch, count = tokens.shape
        self.mask = extend_mask(self.mask, parents.numpy(), self.step.dtype)

        # 2. The nodes that are not padding. Trees that grow together count as one sequence of B F nodes.
        drafted = number_nodes(batch * count)
        if sum(sizes) < len(drafted):
            drafted = np.flatnonzero(number_nodes(count) < np.array(sizes)[:, None])

        # 3. The step. Its columns stay in the cache until the next cycle.
        store = self.cache.tree_layers[0]
        output = self.step.run(
            tokens=tokens,
            vocabulary=self.vocabulary,
            features=self.states,
            parents=parents,
            positions=self.positions.repeat(count, axis=1),
            table=self.table,
            mask=self.mask,
            store=store,
            drafted=drafted,
        )
        store.advance(count)
        self.states = output.states
        self.positions = self.positions + 1
        return list(output.logits.split(sizes))
