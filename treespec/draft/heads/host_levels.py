"""Drafts the levels of one sequence on a CPU with an EAGLE head, a level by one C call.

`EagleProposer` drafts as this does for any number of sequences, on any device.
"""

from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from treespec.draft.drafter import Frontier
from treespec.draft.heads.base import WaitingPairs
from treespec.heads.eagle import EagleHead
from treespec.kernels import ops as kernels
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import view_bits_on_host
from treespec.model.cpu.head_step import HeadStep
from treespec.model.cpu.packed_layers import PackedLinear
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


def extend_mask(above: np.ndarray, parents: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns [F, U + F] additive: what each node of a level sees in the columns of this level and those above.

    A node sees what its parent sees, and itself. Level 1 is a b, level 2 is c d e; c and d are below a:

        columns    a b        columns    a b | c d e
        a          x .        c          x . | x . .
        b          . x        d          x . | . x .
                              e          . x | . . x

    above: [M, U] of the level above. parents: [F] the row of each node's parent there.
    """
    hidden, seen = list_mask_numbers(dtype)
    count = len(parents)
    earlier = above.shape[1]
    mask = np.full((count, earlier + count), hidden)
    mask[:, :earlier] = above[parents]
    np.fill_diagonal(mask[:, earlier:], seen)
    return mask


@final
class HostLevels:
    """The levels of a cycle's tree, in the columns after the sequence's pairs.

    Attributes:
        step: the head's step.
        cache: of the head's only layer, with one sequence.
        table: [2, positions, R] rotary angles.
        vocabulary: [N] the target's token for each draft token; None: all of them.
        states: [F, H] of the present frontier.
        mask: [F, U] additive, the columns of drafted levels that each frontier node sees.
        position: of the next level.
    """

    states: Tensor

    def __init__(
        self, step: HeadStep, cache: TreeCache, table: Tensor, vocabulary: Tensor | None
    ) -> None:
        self.step = step
        self.cache = cache
        self.table = table
        self.vocabulary = vocabulary
        self.mask = np.empty((1, 0), dtype=list_mask_numbers(step.dtype).dtype)
        self.position = 0

    def read_pairs(self, pairs: WaitingPairs) -> Tensor:
        """Reads new pairs of the sequence. Returns [1, N] draft logits of the root's children."""
        # 1. The pairs are a chain after the earlier ones.
        cache = self.cache
        count = len(pairs)
        (start,) = cache.lengths
        cache.write_after(0)  # drops the levels of the last cycle
        self.position = start + count
        output = self.step.run(
            tokens=pairs.tokens,
            vocabulary=None,
            features=pairs.features.contiguous(),
            parents=build_range(count, pairs.tokens.device),
            angles=self.table[:, start : self.position],
            mask=build_causal_mask(count, self.step.dtype),
            store=cache.tree_layers[0],
            drafted=1,
        )

        # 2. They stay in the cache; the root is the frontier.
        cache.commit([range(count)])
        self.states = output.states[-1:]
        return output.logits

    def extend(self, frontier: Frontier) -> Tensor:
        """Drafts a level. Returns [F, N] draft logits."""
        # 1. A node sees what its parent sees, and itself.
        count = len(frontier.tokens)
        parents = frontier.parent_rows
        self.mask = extend_mask(self.mask, parents.numpy(), self.step.dtype)

        # 2. The step. Its columns stay in the cache until the next cycle.
        store = self.cache.tree_layers[0]
        output = self.step.run(
            tokens=frontier.tokens,
            vocabulary=self.vocabulary,
            features=self.states,
            parents=parents,
            angles=self.table[:, self.position : self.position + 1],
            mask=self.mask,
            store=store,
            drafted=count,
        )
        store.advance(count)
        self.states = output.states
        self.position += 1
        return output.logits
