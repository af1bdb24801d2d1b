"""Decoder layers as one call each on a CPU, where a trial shows that this has a layer's own output.

A forward over one token of a small model spends half of its time between the products: 50 small
operations a layer, and Python. `layer.c` computes a layer of Llama's family in one parallel region.
"""

from contextlib import suppress
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.model import kernels
from treespec.model.attention import NAME
from treespec.model.cache import TreeCache
from treespec.model.masks import additive
from treespec.model.tree_layer import TreeLayer

PARAMETERS = Struct("26P17l3f3i")  # `Layer` of layer.c: pointers, sizes and strides, numbers, modes
PRODUCTS = [f"self_attn.{name}_proj" for name in "qkvo"]
PRODUCTS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
FAR = 1 << 20  # a position at which some models scale their queries


@final
class Block:
    """Weights and sizes of a packed decoder layer, as `layer.c` takes them."""

    def __init__(self, layer: Any, norms: list[str], sign: float) -> None:
        """sign: of the first half's sines. Raises errors of many kinds for a layer of other parts."""
        parts = dict(layer.named_modules())
        products = [parts[name] for name in PRODUCTS]
        small = [product.bias for product in products]
        small += [getattr(parts.get(name), "weight", None) for name in norms]
        (self.dtype,) = {x.dtype for x in small if x is not None}
        (form,) = {product.form for product in products}
        q, k, v, output, gate, _, down = products
        width, self.hidden, inner = q.in_features, gate.in_features, gate.out_features
        wide, narrow, d = output.in_features, v.out_features, layer.self_attn.head_dim
        if (q.out_features, k.out_features, down.in_features) != (
            wide,
            narrow,
            inner,
        ) or narrow < d:
            raise ValueError  # gated queries, values of another width
        self.kv = narrow // d, d  # heads and their width
        self.sizes = width, self.hidden, wide // d, *self.kv, inner
        scale = getattr(layer.self_attn, "scaling", d**-0.5)
        self.modes = scale, layer.post_attention_layernorm.eps, sign, form, kernels.HALF[self.dtype]
        self.tensors = [*(product.packed for product in products), *small]

    def run(
        self, x: Tensor, residual: Tensor, mask: Tensor, angles: Any, store: TreeLayer
    ) -> Tensor:
        """[B, N, H] the layer's output, in the dtype of its weights.

        x: [B, N, in]. residual: [B, N, H], which the attention's output is added to. mask: [B or 1,
        1, N, T] additive, of the last columns. angles: cos and sin, [B or 1, N or 1, R]. store: N columns are written.
        """
        # 1. Storage for the new columns.
        (cos, sin), (b, n, _), columns = angles, x.shape, store.length + x.shape[1]
        store.reserve(columns)
        if not store.storage:
            states = x.new_empty(b, self.kv[0], 0, self.kv[1])
            store.lazy_initialization(states, states)

        # 2. The call.
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        tensors = *self.tensors, x, residual, cos, sin, mask, *store.storage, out
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        by_row = [
            part.stride(i) * (part.shape[i] > 1) for part, i in ((cos, 0), (cos, 1), (mask, 0))
        ]
        free = (
            columns - store.first - mask.shape[-1]
        )  # every node sees the columns before the mask's
        shown = columns, store.capacity, store.first, free
        lengths = *self.sizes, cos.shape[-1], *shown, *by_row, mask.stride(2)
        threads = torch.get_num_threads()
        kernels.library().layer(PARAMETERS.pack(*pointers, b, n, *lengths, *self.modes, threads))
        return out


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give decoder layers of packed models and heads a fused forward; others keep their own."""
    for layer in model.modules():
        for way in (fuse_layer, fuse_head):
            with suppress(Exception):  # other parts; and a model's own code may raise anything
                way(layer)


def fuse_layer(layer: Any) -> None:
    """A model's decoder layer, if a trial agrees: on two texts of five nodes, in bfloat16 to the bit."""
    # 1. Random inputs, far off.
    block, own, parts = Block(layer, NORMS, -1.0), layer.forward, (layer.self_attn, layer.mlp)
    number, random = parts[0].layer_idx, torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, block.hidden, generator=random).to(block.dtype)
    angles = torch.randn(2, 2, 5, block.kv[1] // 2, generator=random).repeat(1, 1, 1, 2).to(x)
    seen = torch.eye(5) + torch.rand(5, 5, generator=random)
    mask, places = additive(seen > 0.5, x.dtype)[None, None], torch.arange(5)[None] + FAR

    # 2. Outputs, keys and values of both.
    cache, store = TreeCache(number + 1, 5), TreeLayer(5)
    given = {"position_ids": places, "position_embeddings": angles, "past_key_values": cache}
    expected = own(x, attention_mask=mask, **given), *cache.tree_layers[number].storage
    found = block.run(x, x, mask, angles, store), *store.storage
    error = 0.0 if x.dtype == torch.bfloat16 else 1e-5
    if not all(torch.allclose(*pair, error, error) for pair in zip(expected, found, strict=True)):
        return

    # 3. The forward. Layers of which a part is skipped, or whose attention is watched, run their own.
    def forward(hidden_states: Tensor, **given: Any) -> Any:
        cache: Any = given.get("past_key_values")
        takes = type(cache) is TreeCache and parts[0].config._attn_implementation == NAME
        takes = takes and hidden_states.dtype == block.dtype
        if not takes or parts != (layer.self_attn, layer.mlp):
            return own(hidden_states, **given)
        mask, angles = given["attention_mask"], given["position_embeddings"]
        return block.run(hidden_states, hidden_states, mask, angles, cache.tree_layers[number])

    layer.forward = forward


def fuse_head(layer: Any) -> None:
    """A draft head's layer, whose attention may round otherwise."""
    block, own = Block(layer, ["none", *NORMS[1:]], 1.0), layer.forward
    inputs, windowed = layer.inputs, layer.self_attn.windowed

    def forward(x: Tensor, attend: Any) -> Tensor:
        given = attend.keywords
        mask, store = given.get("mask"), given.get("cache")
        if mask is None or store is None or "context" in given:
            return own(x, attend)
        angles = [part.flatten(0, -3) for part in given["angles"]]
        taken, residual = inputs(x)
        return block.run(taken, residual, additive(windowed(mask), x.dtype), angles, store)

    layer.forward = forward
