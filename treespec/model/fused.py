"""Decoder layers as one call each on a CPU, where a trial shows that this has a layer's own output.

A forward over one token of a small model spends half of its time between the products: 50 small
operations a layer, and Python. `layer.c` computes a layer of Llama's family in one parallel region.
"""

from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.heads.layers import Attend, Layer, last_seen
from treespec.model import kernels
from treespec.model.attention import NAME
from treespec.model.cache import TreeCache, TreeLayer
from treespec.model.masks import additive
from treespec.model.packed import PackedNorm

PARAMETERS = Struct("26P15l3f3i")  # `Layer` of layer.c: pointers, sizes and strides, numbers, modes
PRODUCTS = [f"self_attn.{name}_proj" for name in "qkvo"]
PRODUCTS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
TAKEN = {"attention_mask", "position_embeddings", "past_key_values", "position_ids", "use_cache"}
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
        (eps,) = {part.eps for part in parts.values() if isinstance(part, PackedNorm)}
        q, k, *_, gate, _, _ = products
        d = self.d = layer.self_attn.head_dim
        self.kv, self.hidden = k.out_features // d, gate.in_features
        self.sizes = q.in_features, self.hidden, q.out_features // d, self.kv, d, gate.out_features
        self.numbers = getattr(layer.self_attn, "scaling", d**-0.5), eps, sign
        self.modes = form, kernels.HALF[self.dtype]
        self.tensors = [*(product.packed for product in products), *small]

    def run(
        self, x: Tensor, residual: Tensor, mask: Tensor, angles: Any, store: TreeLayer
    ) -> Tensor | None:
        """[B, N, H] the layer's output, or None where it does not take these tensors.

        x: [B, N, in]. residual: [B, N, H], which the attention's output is added to. mask: [B or 1,
        1, N, T] additive. angles: cos and sin, [B or 1, N or 1, R]. store: N columns are written.
        """
        # 1. Whether it takes them.
        (cos, sin), (b, n, _), columns = angles, x.shape, store.length + x.shape[1]
        same = mask.shape in ((b, 1, n, columns), (1, 1, n, columns)) and type(store) is TreeLayer
        if not same or not all(kernels.fits(part, self.dtype) for part in (x, mask, cos, sin)):
            return None

        # 2. Storage for the new columns.
        store.reserve(columns)
        if not store.storage:
            store.lazy_initialization(*[x.new_empty(b, self.kv, 0, self.d)] * 2)

        # 3. The call.
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        tensors = *self.tensors, x, residual, cos, sin, mask, *store.storage, out
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        by_row = [part.stride(i) * (part.shape[i] > 1) for part, i in ((cos, 0), (cos, 1), (mask, 0))]
        lengths = *self.sizes, cos.shape[-1], columns, store.capacity, *by_row, mask.stride(2)
        modes = *self.numbers, *self.modes, torch.get_num_threads()
        kernels.library().layer(PARAMETERS.pack(*pointers, b, n, *lengths, *modes))
        return out


def fused_layer(layer: Any) -> Callable[..., Any]:
    """The forward of a model's decoder layer. What the block does not take goes to the layer's own."""
    block, own, parts = Block(layer, NORMS, -1.0), layer.forward, (layer.self_attn, layer.mlp)

    def forward(x: Tensor, **given: Any) -> Any:
        kept, mask = given.get("past_key_values"), given.get("attention_mask")
        whole = parts == (layer.self_attn, layer.mlp) and mask is not None  # no part is skipped
        trees = parts[0].config._attn_implementation == NAME and type(kept) is TreeCache
        out = None
        if whole and trees and given.keys() <= TAKEN:
            store = kept.tree_layers[parts[0].layer_idx]
            out = block.run(x, x, mask, given["position_embeddings"], store)
        return own(x, **given) if out is None else out

    return forward if has_own_output(forward, layer, block) else own


def fused_head_layer(layer: Layer) -> Callable[[Tensor, Attend], Tensor]:
    """The same of a draft head's layer, whose attention may round otherwise."""
    block, own = Block(layer, ["none", *NORMS[1:]], 1.0), layer.forward

    def forward(x: Tensor, attend: Attend) -> Tensor:
        given, window, out = attend.keywords, layer.self_attn.window, None
        if (mask := given.get("mask")) is not None and (store := given.get("cache")) is not None:
            mask = additive(last_seen(mask, window) if window else mask, x.dtype)
            angles = [part.flatten(0, -3) for part in given["angles"]]
            out = block.run(*layer.inputs(x), mask, angles, store)
        return own(x, attend) if out is None else out

    return forward


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give decoder layers of packed models and heads a fused forward; others keep their own."""
    for layer in model.modules():
        with suppress(Exception):  # other parts; and a model's own code may raise anything
            if isinstance(layer, Layer):
                layer.forward = fused_head_layer(layer)
            elif "self_attn" in layer._modules:
                layer.forward = fused_layer(layer)


def has_own_output(forward: Any, layer: Any, block: Block) -> bool:
    """Whether two texts of five nodes have the layer's own output, keys and values by `forward`.

    In bfloat16 to the bit. Node 4 does not see node 3.
    """
    random, number, sides = torch.Generator().manual_seed(0), layer.self_attn.layer_idx, []
    x = torch.randn(2, 5, block.hidden, generator=random).to(block.dtype)
    turns = torch.randn(2, 5, block.d // 2, generator=random).repeat(1, 1, 2)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[4, 3] = False
    given = {
        "attention_mask": additive(seen, block.dtype)[None, None],
        "position_ids": torch.arange(FAR, FAR + 5)[None],
        "position_embeddings": [part.to(block.dtype) for part in (turns.cos(), turns.sin())],
    }
    for code in (layer.forward, forward):
        kept = TreeCache(number + 1, 5)
        sides.append([code(x, past_key_values=kept, **given), *kept.tree_layers[number].storage])
    error = 0.0 if block.dtype == torch.bfloat16 else 1e-5
    return all(torch.allclose(*pair, error, error) for pair in zip(*sides, strict=True))
