"""Runs a Llama layer on a CPU as one C call, if a trial input gives the same output.

A forward over one token of a small model spends half of its time between the matrix products: 50 small
operations a layer, and Python. `layer.c` computes a layer of Llama's family in one parallel region.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.kernels import ops as kernels
from treespec.model.attention import ATTENTION_NAME
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.masks import to_additive_mask

LAYER_STRUCT = Struct(
    "26P17l3f3i"
)  # `Layer` of layer.c: pointers, sizes and strides, numbers, modes
PROJECTION_NAMES = [f"self_attn.{name}_proj" for name in "qkvo"]
PROJECTION_NAMES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORM_NAMES = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
HEAD_NORM_NAMES = ["none", *NORM_NAMES[1:]]  # a head's layer gets its input normed
HEAD_SIGN = 1.0  # of the first half's sines: a head's table has them negated
FAR_POSITION = 1 << 20  # a position at which some models scale their queries


@final
class Block:
    """Weights and sizes of a packed decoder layer, as `layer.c` takes them."""

    def __init__(self, layer: Any, norms: list[str], sign: float) -> None:
        """Read the weights of a layer. Raises errors of many kinds for a layer with other modules.

        Args:
            layer: a packed decoder layer.
            norms: names of its norms; "none" for a missing one.
            sign: of the first half's sines in the rotary embedding.
        """
        modules = dict(layer.named_modules())
        products = [modules[name] for name in PROJECTION_NAMES]
        small_tensors = [product.bias for product in products]
        small_tensors += [getattr(modules.get(name), "weight", None) for name in norms]
        (self.dtype,) = {x.dtype for x in small_tensors if x is not None}
        (form,) = {product.form for product in products}
        q, k, v, output, gate, _, down = products
        width = q.in_features
        self.hidden = gate.in_features
        inner = gate.out_features
        query_width = output.in_features
        value_width = v.out_features
        d = layer.self_attn.head_dim
        if (q.out_features, k.out_features, down.in_features) != (
            query_width,
            value_width,
            inner,
        ) or value_width < d:
            raise ValueError  # gated queries, values of another width
        self.kv = value_width // d, d  # heads and their width
        self.sizes = width, self.hidden, query_width // d, *self.kv, inner
        scale = getattr(layer.self_attn, "scaling", d**-0.5)
        self.modes = (
            scale,
            layer.post_attention_layernorm.eps,
            sign,
            form,
            kernels.BFLOAT16_FLAGS[self.dtype],
        )
        parts = [*(product.packed for product in products), *small_tensors]
        # Keeps the memory at `pointers` alive when the layer's parameters are replaced.
        self.tensors = [None if part is None else part.detach() for part in parts]
        self.pointers = [0 if part is None else part.data_ptr() for part in self.tensors]


def run(
    blocks: Sequence[Block], x: Tensor, residual: Tensor, mask: Tensor, angles: Any, stores: Sequence[TreeLayer]
) -> Tensor:  # fmt: skip
    """Run consecutive layers. Returns [B, N, H], in the dtype of their weights.

    Args:
        blocks: the layers.
        x: [B, N, in] input of the first layer.
        residual: [B, N, H], to which the first attention's output is added.
        mask: [B or 1, 1, N, T] additive, of the last columns.
        angles: cos and sin, [B or 1, N or 1, R].
        stores: by layer, its cache, where N columns are written.
    """
    (cos, sin) = angles
    (b, n, _) = x.shape
    x = x.contiguous()
    residual = residual.contiguous()
    out = torch.empty_like(residual)
    shared = [tensor.data_ptr() for tensor in (x, residual, cos, sin, mask)]
    by_row = [part.stride(i) * (part.shape[i] > 1) for part, i in ((cos, 0), (cos, 1), (mask, 0))]
    threads = torch.get_num_threads()
    calls = bytearray()
    for block, store in zip(blocks, stores, strict=True):
        # 1. Storage for the new columns.
        columns = store.length + n
        store.reserve(columns)
        if not store.storage:
            states = x.new_empty(b, block.kv[0], 0, block.kv[1])
            store.lazy_initialization(states, states)

        # 2. Pointers and sizes of the layer. A layer after the first overwrites its input in place.
        pointers = [*block.pointers, *shared, *(part.data_ptr() for part in store.storage)]
        shared[:2] = out.data_ptr(), out.data_ptr()
        free_columns = (
            columns - store.first - mask.shape[-1]
        )  # every node sees the columns before the mask's
        columns_and_strides = columns, store.capacity, store.first, free_columns
        lengths = *block.sizes, cos.shape[-1], *columns_and_strides, *by_row, mask.stride(2)
        calls += LAYER_STRUCT.pack(*pointers, out.data_ptr(), b, n, *lengths, *block.modes, threads)
    kernels.load_kernels().layers(bytes(calls), len(blocks))
    return out


@final
class Stack:
    """A model's fused layers. A call of a layer runs all following layers up to the next one with a hook.

    a hook before layer 2:   layer     0       1               2             3
                             computes  0 to 1  passes x on     2 to 3        passes x on
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Any, Block, tuple[Any, Any]]] = {}  # with attention and MLP
        self.ahead: tuple[Tensor | None, int] = (
            None,
            0,
        )  # an output, and the layer that is to read it

    def add(self, i: int, layer: Any, block: Block) -> None:
        """Give layer i a fused forward, which falls back to the plain forward for other caches or dtypes."""
        plain_forward = layer.forward
        self.layers.setdefault(i, (layer, block, (layer.self_attn, layer.mlp)))
        if self.layers[i][0] is not layer:
            return  # of another decoder in the model

        def forward(hidden_states: Tensor, **arguments: Any) -> Any:
            output, next_layer = self.ahead
            if output is not hidden_states or i >= next_layer:
                cache: Any = arguments.get("past_key_values")
                is_supported = type(cache) is TreeCache and hidden_states.dtype == block.dtype
                is_supported = (
                    is_supported and layer.self_attn.config._attn_implementation == ATTENTION_NAME
                )
                if not is_supported or not self.is_fusable(i):
                    return plain_forward(hidden_states, **arguments)
                next_layer = self.find_run_end(i, cache.tree_layers)
                blocks = [self.layers[j][1] for j in range(i, next_layer)]
                mask = arguments["attention_mask"]
                angles = arguments["position_embeddings"]
                stores = cache.tree_layers[i:next_layer]
                output = run(blocks, hidden_states, hidden_states, mask, angles, stores)
            self.ahead = (output, next_layer) if i + 1 < next_layer else (None, 0)
            return output

        layer.forward = forward

    def is_fusable(self, i: int) -> bool:
        """Whether layer i is fused, and still has the attention and MLP that were fused."""
        layer, _, parts = self.layers.get(i, (None, None, None))
        return layer is not None and parts == (layer.self_attn, layer.mlp)

    def find_run_end(self, i: int, stores: Sequence[TreeLayer]) -> int:
        """Return the first layer after i with another window, without a fused forward, or behind a hook."""
        j = i + 1
        while self.is_fusable(j) and stores[j].window == stores[i].window:
            if self.layers[j - 1][0]._forward_hooks or self.layers[j][0]._forward_pre_hooks:
                break
            j += 1
        return j


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give decoder layers of packed models and heads a fused forward; other modules keep theirs."""
    stack = Stack()
    for layer in model.modules():
        for fuse_module in (partial(fuse_layer, stack=stack), fuse_head):
            with suppress(Exception):  # other modules; and a model's code may raise anything
                fuse_module(layer)


def fuse_layer(layer: Any, stack: Stack) -> None:
    """Fuse a model's decoder layer, if a trial agrees: on two texts of five nodes, in bfloat16 to the bit."""
    # 1. Random inputs, at positions where some models scale their queries.
    block = Block(layer, NORM_NAMES, -1.0)
    number = layer.self_attn.layer_idx
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, block.hidden, generator=random).to(block.dtype)
    angles = torch.randn(2, 2, 5, block.kv[1] // 2, generator=random).repeat(1, 1, 1, 2).to(x)
    visible = torch.eye(5) + torch.rand(5, 5, generator=random)
    mask = to_additive_mask(visible > 0.5, x.dtype)[None, None]
    positions = torch.arange(5)[None] + FAR_POSITION

    # 2. Compare outputs, keys and values of both.
    cache = TreeCache(number + 1, 5)
    store = TreeLayer(5)
    arguments = {"position_ids": positions, "position_embeddings": angles, "past_key_values": cache}
    expected = layer(x, attention_mask=mask, **arguments), *cache.tree_layers[number].storage
    outputs = run([block], x, x, mask, angles, [store]), *store.storage
    tolerance = 0.0 if x.dtype == torch.bfloat16 else 1e-5
    if all(
        torch.allclose(*pair, tolerance, tolerance) for pair in zip(expected, outputs, strict=True)
    ):
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
        return run([block], attention_input, residual, mask, angles, [store])

    layer.forward = forward
