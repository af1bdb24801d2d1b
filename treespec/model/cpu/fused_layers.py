"""Decoder layers as one call each on a CPU, where a trial shows that this has a layer's own output.

A forward over one token of a small model spends half of its time between the products: 50 small
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
FAR_POSITION = 1 << 20  # a position at which some models scale their queries


@final
class Block:
    """Weights and sizes of a packed decoder layer, as `layer.c` takes them."""

    def __init__(self, layer: Any, norms: list[str], sign: float) -> None:
        """sign: of the first half's sines. Raises errors of many kinds for a layer of other parts."""
        modules = dict(layer.named_modules())
        products = [modules[name] for name in PROJECTION_NAMES]
        small = [product.bias for product in products]
        small += [getattr(modules.get(name), "weight", None) for name in norms]
        (self.dtype,) = {x.dtype for x in small if x is not None}
        (form,) = {product.form for product in products}
        q, k, v, output, gate, _, down = products
        width = q.in_features
        self.hidden = gate.in_features
        inner = gate.out_features
        wide = output.in_features
        narrow = v.out_features
        d = layer.self_attn.head_dim
        if (q.out_features, k.out_features, down.in_features) != (
            wide,
            narrow,
            inner,
        ) or narrow < d:
            raise ValueError  # gated queries, values of another width
        self.kv = narrow // d, d  # heads and their width
        self.sizes = width, self.hidden, wide // d, *self.kv, inner
        scale = getattr(layer.self_attn, "scaling", d**-0.5)
        self.modes = (
            scale,
            layer.post_attention_layernorm.eps,
            sign,
            form,
            kernels.BFLOAT16_FLAGS[self.dtype],
        )
        parts = [*(product.packed for product in products), *small]
        # They keep the memory at `pointers`, whatever becomes of the layer's parameters.
        self.tensors = [None if part is None else part.detach() for part in parts]
        self.pointers = [0 if part is None else part.data_ptr() for part in self.tensors]


def run(
    blocks: Sequence[Block], x: Tensor, residual: Tensor, mask: Tensor, angles: Any, stores: Sequence[TreeLayer]
) -> Tensor:  # fmt: skip
    """[B, N, H] the output of layers in a row, in the dtype of their weights.

    x: [B, N, in]. residual: [B, N, H], which the first attention's output is added to. mask: [B or 1, 1, N, T]
    additive, of the last columns. angles: cos and sin, [B or 1, N or 1, R]. stores: N columns of each layer's
    are written.
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

        # 2. What the layer reads and writes. A layer after the first replaces its input, when all have read it.
        pointers = [*block.pointers, *shared, *(part.data_ptr() for part in store.storage)]
        shared[:2] = out.data_ptr(), out.data_ptr()
        free = (
            columns - store.first - mask.shape[-1]
        )  # every node sees the columns before the mask's
        shown = columns, store.capacity, store.first, free
        lengths = *block.sizes, cos.shape[-1], *shown, *by_row, mask.stride(2)
        calls += LAYER_STRUCT.pack(*pointers, out.data_ptr(), b, n, *lengths, *block.modes, threads)
    kernels.load_kernels().layers(bytes(calls), len(blocks))
    return out


@final
class Stack:
    """A model's fused layers. A layer's call computes all up to the next that somebody watches.

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
        """Layer i gets a fused forward. What it does not take runs the layer's own."""
        own = layer.forward
        self.layers.setdefault(i, (layer, block, (layer.self_attn, layer.mlp)))
        if self.layers[i][0] is not layer:
            return  # of another decoder in the model

        def forward(hidden_states: Tensor, **given: Any) -> Any:
            done, after = self.ahead
            if done is not hidden_states or i >= after:
                cache: Any = given.get("past_key_values")
                takes = type(cache) is TreeCache and hidden_states.dtype == block.dtype
                takes = takes and layer.self_attn.config._attn_implementation == ATTENTION_NAME
                if not takes or not self.is_fusable(i):
                    return own(hidden_states, **given)
                after = self.find_run_end(i, cache.tree_layers)
                blocks = [self.layers[j][1] for j in range(i, after)]
                mask = given["attention_mask"]
                angles = given["position_embeddings"]
                stores = cache.tree_layers[i:after]
                done = run(blocks, hidden_states, hidden_states, mask, angles, stores)
            self.ahead = (done, after) if i + 1 < after else (None, 0)
            return done

        layer.forward = forward

    def is_fusable(self, i: int) -> bool:
        """Whether layer i is fused, and no part of it is skipped."""
        layer, _, parts = self.layers.get(i, (None, None, None))
        return layer is not None and parts == (layer.self_attn, layer.mlp)

    def find_run_end(self, i: int, stores: Sequence[TreeLayer]) -> int:
        """The first layer after i that has another mask or forward, or whose input somebody watches."""
        j = i + 1
        while self.is_fusable(j) and stores[j].window == stores[i].window:
            if self.layers[j - 1][0]._forward_hooks or self.layers[j][0]._forward_pre_hooks:
                break
            j += 1
        return j


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give decoder layers of packed models and heads a fused forward; others keep their own."""
    stack = Stack()
    for layer in model.modules():
        for way in (partial(fuse_layer, stack=stack), fuse_head):
            with suppress(Exception):  # other parts; and a model's own code may raise anything
                way(layer)


def fuse_layer(layer: Any, stack: Stack) -> None:
    """A model's decoder layer, if a trial agrees: on two texts of five nodes, in bfloat16 to the bit."""
    # 1. Random inputs, far off.
    block = Block(layer, NORM_NAMES, -1.0)
    number = layer.self_attn.layer_idx
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, block.hidden, generator=random).to(block.dtype)
    angles = torch.randn(2, 2, 5, block.kv[1] // 2, generator=random).repeat(1, 1, 1, 2).to(x)
    seen = torch.eye(5) + torch.rand(5, 5, generator=random)
    mask = to_additive_mask(seen > 0.5, x.dtype)[None, None]
    places = torch.arange(5)[None] + FAR_POSITION

    # 2. Outputs, keys and values of both.
    cache = TreeCache(number + 1, 5)
    store = TreeLayer(5)
    given = {"position_ids": places, "position_embeddings": angles, "past_key_values": cache}
    expected = layer(x, attention_mask=mask, **given), *cache.tree_layers[number].storage
    found = run([block], x, x, mask, angles, [store]), *store.storage
    error = 0.0 if x.dtype == torch.bfloat16 else 1e-5
    if all(torch.allclose(*pair, error, error) for pair in zip(expected, found, strict=True)):
        stack.add(number, layer, block)


def fuse_head(layer: Any) -> None:
    """A draft head's layer, whose attention may round otherwise."""
    block = Block(layer, ["none", *NORM_NAMES[1:]], 1.0)
    own = layer.forward
    inputs = layer.split_inputs
    windowed = layer.self_attn.apply_window

    def forward(x: Tensor, attend: Any) -> Tensor:
        given = attend.keywords
        mask = given.get("mask")
        store = given.get("cache")
        if mask is None or store is None or "context" in given:
            return own(x, attend)
        angles = [part.flatten(0, -3) for part in given["angles"]]
        taken, residual = inputs(x)
        mask = to_additive_mask(windowed(mask), x.dtype)
        return run([block], taken, residual, mask, angles, [store])

    layer.forward = forward
