"""Gives decoder layers a forward that runs them as one C call, if a trial input gives the same output."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from treespec.model.attention import ATTENTION_NAME
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.cpu.decoder_block import (
    HEAD_NORM_NAMES,
    HEAD_SIGN,
    MODEL_SIGN,
    NORM_NAMES,
    Block,
    run_blocks,
)
from treespec.model.masks import to_additive_mask

FAR_POSITION = 1 << 20  # a position at which some models scale their queries
FLOAT32_TOLERANCE = 1e-5  # absolute and relative, of a trial; in bfloat16 the bits are equal


class FusedLayer(NamedTuple):
    """A decoder layer with a fused forward, and the modules that it had when it was fused."""

    layer: Any
    block: Block
    attention: nn.Module
    mlp: nn.Module


class ComputedOutput(NamedTuple):
    """An output [B, N, H], and the layer that is to read it: those before only pass it on."""

    output: Tensor | None
    next_layer: int


NO_OUTPUT = ComputedOutput(None, 0)


@final
class Stack:
    """A model's fused layers. A call of a layer runs all following layers up to the next one with a hook.

    a hook before layer 2:   layer     0       1               2             3
                             computes  0 to 1  passes x on     2 to 3        passes x on
    """

    def __init__(self) -> None:
        self.layers: dict[int, FusedLayer] = {}
        self.computed = NO_OUTPUT

    def add(self, i: int, layer: Any, block: Block) -> None:
        """Give layer i a fused forward, which falls back to the plain forward for other caches or dtypes."""
        plain_forward = layer.forward
        fused = self.layers.setdefault(i, FusedLayer(layer, block, layer.self_attn, layer.mlp))
        if fused.layer is not layer:
            return  # of another decoder in the model

        def forward(hidden_states: Tensor, **arguments: Any) -> Any:
            output, next_layer = self.computed
            if output is not hidden_states or i >= next_layer:
                if not self.can_run(i, hidden_states, arguments.get("past_key_values")):
                    return plain_forward(hidden_states, **arguments)
                self.run(i, hidden_states, arguments)
                output, next_layer = self.computed
            if i + 1 >= next_layer:
                self.computed = NO_OUTPUT
            return output

        layer.forward = forward

    def can_run(self, i: int, hidden_states: Tensor, cache: Any) -> bool:
        """Whether the fused forward of layer i computes what the model asks for."""
        if type(cache) is not TreeCache or not self.is_fusable(i):
            return False
        layer, block, _, _ = self.layers[i]
        if hidden_states.dtype != block.dtype:
            return False
        return layer.self_attn.config._attn_implementation == ATTENTION_NAME

    def run(self, i: int, hidden_states: Tensor, arguments: dict[str, Any]) -> None:
        """Run layer i and those that can follow in one call, and keep the output for the layers that pass it on.

        arguments: of the layer's forward, as transformers calls it.
        """
        cache = arguments["past_key_values"]
        stores = cache.tree_layers
        end = self.find_run_end(i, stores)
        blocks = [self.layers[j].block for j in range(i, end)]
        mask = arguments["attention_mask"]
        angles = arguments["position_embeddings"]
        states = hidden_states
        counts = cache.node_counts
        output = run_blocks(blocks, states, states, mask, angles, stores[i:end], counts)
        self.computed = ComputedOutput(output, end)

    def is_fusable(self, i: int) -> bool:
        """Whether layer i is fused, and still has the attention and MLP that were fused."""
        fused = self.layers.get(i)
        if fused is None:
            return False
        layer, _, attention, mlp = fused
        return layer.self_attn is attention and layer.mlp is mlp

    def find_run_end(self, i: int, stores: Sequence[TreeLayer]) -> int:
        """Return the first layer after i with another window, without a fused forward, or behind a hook."""
        window = stores[i].window
        j = i + 1
        while self.is_fusable(j) and stores[j].window == window:
            previous = self.layers[j - 1].layer
            layer = self.layers[j].layer
            if previous._forward_hooks or layer._forward_pre_hooks:
                break
            j += 1
        return j


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give decoder layers of packed models and heads a fused forward; other modules keep theirs."""
    stack = Stack()
    for layer in model.modules():
        # Other modules raise errors of many kinds, and a model's code may raise anything.
        with suppress(Exception):
            fuse_layer(layer, stack)
        with suppress(Exception):
            fuse_head(layer)


def fuse_layer(layer: Any, stack: Stack) -> None:
    """Fuse a model's decoder layer, if a trial agrees: on two texts of five nodes, in bfloat16 to the bit."""
    # 1. Random inputs, at positions where some models scale their queries.
    block = Block(layer, NORM_NAMES, MODEL_SIGN)
    number = layer.self_attn.layer_idx
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, block.hidden, generator=random).to(block.dtype)
    half_angles = torch.randn(2, 2, 5, block.head_width // 2, generator=random)
    angles = half_angles.repeat(1, 1, 1, 2).to(x)
    visible = torch.eye(5) + torch.rand(5, 5, generator=random)
    mask = to_additive_mask(visible > 0.5, x.dtype)[None, None]
    positions = torch.arange(5)[None] + FAR_POSITION

    # 2. Outputs, keys and values of both.
    cache = TreeCache(number + 1, 5)
    expected = layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=angles,
        past_key_values=cache,
    )
    expected_states = (expected, *cache.tree_layers[number].storage)
    store = TreeLayer(5)
    output = run_blocks([block], x, x, mask, angles, [store])
    states = (output, *store.storage)

    # 3. The comparison.
    tolerance = FLOAT32_TOLERANCE
    if x.dtype == torch.bfloat16:
        tolerance = 0.0
    for part, expected_part in zip(states, expected_states, strict=True):
        if not torch.allclose(expected_part, part, tolerance, tolerance):
            return
    stack.add(number, layer, block)


def fuse_head(layer: Any) -> None:
    """Fuse a draft head's layer. There is no trial: drafts may round differently."""
    block = Block(layer, HEAD_NORM_NAMES, HEAD_SIGN)
    plain_forward = layer.forward
    split_inputs = layer.split_inputs
    apply_window = layer.self_attn.apply_window

    def forward(x: Tensor, attend: Any) -> Tensor:
        arguments = attend.keywords
        mask = arguments.get("mask")
        store = arguments.get("cache")
        if mask is None or store is None or "context" in arguments:
            return plain_forward(x, attend)
        angles = [part.flatten(0, -3) for part in arguments["angles"]]
        attention_input, residual = split_inputs(x)
        mask = to_additive_mask(apply_window(mask), x.dtype)
        return run_blocks([block], attention_input, residual, mask, angles, [store])

    layer.forward = forward
