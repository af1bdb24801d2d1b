"""Gives decoder layers a forward that runs them as one C call, if a trial input gives the same output."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.kernels.layers import LayerStack, LayerWeights
from treespec.kernels.ops import BLOCK_BYTES
from treespec.model.attention import ATTENTION_NAME
from treespec.model.cache import LayersAhead, TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.cpu.decoder_block import (
    HEAD_NORM_NAMES,
    HEAD_SIGN,
    MODEL_SIGN,
    NORM_NAMES,
    UnfusableError,
    read_layer,
    run_blocks,
)
from treespec.model.cpu.parts import LayerParts
from treespec.model.masks import to_additive_mask

log = logging.getLogger(__name__)

FAR_POSITION = 1 << 20  # a position at which some models scale their queries
FLOAT32_TOLERANCE = 1e-5  # absolute and relative, of a trial; in bfloat16 the bits are equal
# In float32 the activations differ in the last bits, and some numbers are rounded to eight bits the other way.
EIGHT_BITS_TOLERANCE = 0.02


class LayerInputError(Exception):
    """A layer got another input than the output of the layer before: the forward must run again, layer by layer."""


@final
@dataclass
class Fusion:
    """A model's fused layers.

    Attributes:
        forwards: by the layers' numbers.
        parts: of all fused layers, with their own hooks and forwards.
        stacks: of consecutive layers that have run in one call, by the first one's number and the end.
        reasons: why layers were not fused, with the number of layers.
        runs_ahead: whether a call of a layer may run the following ones too. The decoder of some models changes
            the hidden states between layers; the first forward that finds it out ends this.
    """

    forwards: dict[int, "FusedForward"] = field(default_factory=dict)
    parts: LayerParts = field(default_factory=lambda: LayerParts([]))
    stacks: dict[tuple[int, int], LayerStack] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    runs_ahead: bool = True

    def find_run_end(self, i: int, stores: Sequence[TreeLayer]) -> int:
        """Returns the first layer after i that a call of layer i cannot run too; i itself if its parts have changed.

        It has another window, or changed parts, or is no longer called by its fused forward, or lies behind a hook.
        Whether a parameter's numbers were put elsewhere is looked at when a text begins.

            a hook before layer 2:   layer     0       1               2             3
                                     computes  0 to 1  passes x on     2 to 3        passes x on
        """
        begins = not stores[i].length
        if not self.runs_ahead:
            return i + self.forwards[i].parts.is_unchanged(begins)
        is_unchanged = self.parts.is_unchanged(begins)
        if not is_unchanged and not self.forwards[i].parts.is_unchanged():
            return i
        window = stores[i].window
        j = i + 1
        while j in self.forwards and stores[j].window == window:
            if not is_unchanged and not self.can_follow(j):
                break
            j += 1
        return j

    def get_stack(self, first: int, end: int) -> LayerStack:
        """Returns the layers from `first` until before `end`."""
        stack = self.stacks.get((first, end))
        if stack is None:
            stack = LayerStack([self.forwards[i].weights for i in range(first, end)])
            self.stacks[first, end] = stack
        return stack

    def can_follow(self, j: int) -> bool:
        """Whether a call of layer j - 1 may run layer j too, as far as their own hooks, forwards and parts go."""
        previous = self.forwards[j - 1]
        fused = self.forwards[j]
        if previous.layer._forward_hooks or fused.layer._forward_pre_hooks:
            return False
        return previous.is_called and fused.is_called and fused.parts.is_unchanged()


def get_class_forward(layer: nn.Module) -> Callable[..., Any]:
    """Returns the forward of a layer's class, bound to the layer."""
    forward: Callable[..., Any] = type(layer).forward.__get__(layer)
    return forward


@final
class FusedForward:
    """The forward of a fused decoder layer. Where it does not fit, the layer's own forward runs.

    Attributes:
        fusion: of the model.
        number: of the layer.
        layer: the layer.
        weights: of the layer.
        attention_config: names the attention that the model computes.
        plain_forward: the layer's own.
        parts: of the layer when it was fused.
    """

    def __init__(
        self, fusion: Fusion, number: int, layer: nn.Module, weights: LayerWeights
    ) -> None:
        self.fusion = fusion
        self.number = number
        self.layer: Any = layer
        self.weights = weights
        attention: Any = layer.self_attn
        self.attention_config: Any = attention.config
        self.plain_forward = layer.forward
        self.parts = LayerParts([layer])

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the layer has weights of its own and its own forward: it is not fused."""
        return get_class_forward(memo[id(self.layer)])

    @property
    def is_called(self) -> bool:
        """Whether the layer's calls come here: nobody has put another forward before this one."""
        return vars(self.layer).get("forward") is self

    def __call__(self, hidden_states: Tensor, **arguments: Any) -> Any:
        # 1. A layer before this one has computed it already.
        cache = arguments.get("past_key_values")
        if type(cache) is not TreeCache:
            return self.plain_forward(hidden_states, **arguments)
        ahead = cache.layers_ahead
        if ahead is not None and self.number < ahead.next_layer:
            if hidden_states is not ahead.output:
                raise LayerInputError
            if self.number + 1 == ahead.next_layer:
                cache.layers_ahead = None
            return hidden_states

        # 2. This layer, and those that can follow in the same call.
        stores = cache.tree_layers
        end = self.number
        if self.can_run(hidden_states):
            end = self.fusion.find_run_end(self.number, stores)
        if end == self.number:
            return self.plain_forward(hidden_states, **arguments)
        output = run_blocks(
            self.fusion.get_stack(self.number, end),
            hidden_states,
            hidden_states,
            arguments["attention_mask"],
            arguments["position_embeddings"],
            stores[self.number : end],
            cache.node_counts,
        )
        if end > self.number + 1:
            cache.layers_ahead = LayersAhead(output, end)
        return output

    def can_run(self, hidden_states: Tensor) -> bool:
        """Whether the fused forward computes what the model asks for, if the layer's parts have not changed."""
        if hidden_states.dtype != self.weights.dtype:
            return False
        implementation: str = self.attention_config._attn_implementation
        return implementation == ATTENTION_NAME


@torch.no_grad()
def fuse(model: nn.Module) -> Fusion:
    """Gives decoder layers of packed models and heads a fused forward; other modules keep theirs."""
    fusion = Fusion()
    for layer in list(model.modules()):
        if not {"self_attn", "mlp"} <= layer._modules.keys():
            continue
        try:
            if hasattr(layer, "split_inputs"):
                fuse_head(layer)
            else:
                fuse_layer(layer, fusion)
        except UnfusableError as error:
            fusion.reasons[str(error)] += 1
    fused_layers = [forward.layer for forward in fusion.forwards.values()]
    fusion.parts = LayerParts(fused_layers, with_own_hooks=True)
    for reason, layers in fusion.reasons.items():
        log.info("%d layers of %s are not fused: %s", layers, type(model).__name__, reason)
    return fusion


def fuse_layer(layer: Any, fusion: Fusion) -> None:
    """Fuses a model's decoder layer. Raises UnfusableError with the reason if it computes something else."""
    weights = read_layer(layer, NORM_NAMES, MODEL_SIGN)
    number = getattr(layer.self_attn, "layer_idx", None)
    if type(number) is not int:
        raise UnfusableError("its attention has no number")
    if number in fusion.forwards:
        raise UnfusableError("it is a layer of a second decoder in the model")
    compare_with_modules(layer, weights, number)
    forward = FusedForward(fusion, number, layer, weights)
    fusion.forwards[number] = forward
    layer.forward = forward


def compare_with_modules(layer: Any, weights: LayerWeights, number: int) -> None:
    """Raises UnfusableError unless a trial of two texts of five nodes agrees, in bfloat16 to the bit.

    weights: of the layer. number: of the layer.
    """
    # 1. Random inputs, at positions where some models scale their queries.
    random = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": random, "dtype": torch.float32, "device": "cpu"}
    x = torch.randn(2, 5, weights.hidden, **options).to(weights.dtype)
    half_angles = torch.randn(2, 2, 5, weights.head_width // 2, **options)
    angles = half_angles.repeat(1, 1, 1, 2).to(x)
    visible = torch.eye(5, dtype=torch.float32, device="cpu") + torch.rand(5, 5, **options)
    mask = to_additive_mask(visible > 0.5, x.dtype)[None, None]
    positions = torch.arange(5, device="cpu")[None] + FAR_POSITION

    # 2. Outputs, keys and values of both.
    cache = TreeCache(number + 1, 5)
    try:
        expected = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=angles,
            past_key_values=cache,
        )
    except Exception as error:  # a model's own code may raise anything
        raise UnfusableError(f"its forward takes other arguments ({error})") from error
    store = TreeLayer(5)
    output = run_blocks(LayerStack([weights]), x, x, mask, angles, [store])
    states = (output, *store.storage)
    expected_states = (expected, *cache.tree_layers[number].storage)

    # 3. The comparison.
    tolerance = FLOAT32_TOLERANCE
    if any(product.form in BLOCK_BYTES for product in weights.products):
        tolerance = EIGHT_BITS_TOLERANCE
    if x.dtype == torch.bfloat16:
        tolerance = 0.0
    for part, expected_part in zip(states, expected_states, strict=True):
        is_like = isinstance(expected_part, Tensor) and expected_part.shape == part.shape
        if not is_like or not torch.allclose(expected_part, part, tolerance, tolerance):
            raise UnfusableError("its modules compute something else")


def fuse_head(layer: Any) -> None:
    """Fuses a draft head's layer. There is no trial: drafts may round differently."""
    layer.forward = FusedHeadForward(layer, read_layer(layer, HEAD_NORM_NAMES, HEAD_SIGN))


@final
class FusedHeadForward:
    """The forward of a draft head's fused layer. Where it does not fit, the layer's own forward runs.

    Attributes:
        layer: the layer.
        stack: of the layer alone.
        dtype: of its inputs.
        plain_forward: the layer's own.
        parts: of the layer when it was fused.
    """

    def __init__(self, layer: Any, weights: LayerWeights) -> None:
        self.layer = layer
        self.stack = LayerStack([weights])
        self.dtype = weights.dtype
        self.plain_forward = layer.forward
        self.parts = LayerParts([layer])

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """As `FusedForward`."""
        return get_class_forward(memo[id(self.layer)])

    def __call__(self, x: Tensor, attend: Any) -> Tensor:
        arguments = attend.keywords
        mask = arguments.get("mask")
        store = arguments.get("cache")
        if mask is None or store is None or "context" in arguments:
            return self.plain_forward(x, attend)
        if x.dtype != self.dtype or not self.parts.is_unchanged():
            return self.plain_forward(x, attend)
        angles = [part.flatten(0, -3) for part in arguments["angles"]]
        attention_input, residual = self.layer.split_inputs(x)
        mask = to_additive_mask(self.layer.self_attn.apply_window(mask), x.dtype)
        return run_blocks(self.stack, attention_input, residual, mask, angles, [store])
