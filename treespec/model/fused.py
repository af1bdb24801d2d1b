"""Decoder layers as one call each on a CPU, where a trial shows that this gives a layer's own output.

A forward over one token of a small model spends half of its time between the products: 50 small
operations a layer, and Python. `layer.c` has a whole layer of Llama's family in one parallel region.
"""

from functools import cache
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.model import kernels
from treespec.model.attention import NAME
from treespec.model.cache import TreeCache, TreeLayer
from treespec.model.packed import PackedLinear, PackedNorm

LAYER = Struct("27P14l3f3i")  # `Layer` of layer.c: pointers, sizes and strides, numbers, modes
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
UNREAD = {"position_ids", "use_cache"}  # arguments that a layer passes on and nothing reads
Angles = tuple[Tensor, Tensor]  # cos and sin, [B or 1, N, D]


@final
class FusedLayer:
    """The forward of a decoder layer. What it does not take goes to the layer's own forward."""

    def __init__(self, layer: Any) -> None:
        """Raises AttributeError or ValueError for a layer of other parts."""
        # 1. Products and norms.
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.own, self.index = layer.forward, layer.self_attn.layer_idx
        products = [getattr(self.attention, name) for name in ATTENTION]
        products += [getattr(self.mlp, name) for name in MLP]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.dtype = norms[0].weight.dtype
        given = [norm for norm in norms if norm is not None]
        packed = all(type(product) is PackedLinear for product in products)
        alike = len({product.form for product in products}) == 1
        if not packed or not alike or any(type(norm) is not PackedNorm for norm in given):
            raise ValueError
        biases = [product.bias for product in products]
        weights = [None if norm is None else norm.weight for norm in norms]
        if any(x is not None and x.dtype != self.dtype for x in (*biases, *weights)):
            raise ValueError

        # 2. Sizes, and the activation: a table for 16 bits.
        q, k, *_, gate, _, _ = products
        d = self.attention.head_dim
        self.kv, self.d = k.out_features // d, d
        self.sizes = q.in_features, gate.in_features, q.out_features // d, self.kv, d
        self.inner, self.scale = gate.out_features, self.attention.scaling
        self.eps, self.modes = norms[0].eps, (products[0].form, kernels.HALF[self.dtype])
        table = activated(self.mlp.act_fn) if self.dtype == torch.bfloat16 else None
        self.tensors = [*(product.packed for product in products), *biases, *weights, table]

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Any:
        """As the layer is called. [B, N, H] -> [B, N, H]."""
        whole = self.layer.self_attn is self.attention and self.layer.mlp is self.mlp
        trees = self.attention.config._attn_implementation == NAME and attention_mask is not None
        if whole and trees and type(past_key_values) is TreeCache and others.keys() <= UNREAD:
            store = past_key_values.tree_layers[self.index]
            out = self.run(hidden_states, attention_mask, position_embeddings, store)
            if out is not None:
                return out
        return self.own(
            hidden_states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            **others,
        )

    def run(self, x: Tensor, mask: Tensor, angles: Angles, store: TreeLayer) -> Tensor | None:
        """[B, N, H] the layer's output, or None where it does not take these tensors.

        x: [B, N, H]. mask: [B or 1, 1, N, T] additive. store: N columns are written.
        """
        # 1. Whether the shapes are those that it takes.
        cos, sin = angles
        (b, n, _), columns = x.shape, store.length + x.shape[1]
        same = mask.shape in ((b, 1, n, columns), (1, 1, n, columns))
        turned = cos.shape[-1]
        same = same and cos.shape == sin.shape and cos.shape in ((b, n, turned), (1, n, turned))
        fit = all(kernels.fits(part, self.dtype) for part in (x, mask, cos, sin))
        if not same or not fit or turned > self.d or type(store) is not TreeLayer:
            return None

        # 2. Storage for the new columns.
        store.reserve(columns)
        if not store.storage:
            states = x.new_empty(b, self.kv, 0, self.d)
            store.lazy_initialization(states, states)

        # 3. The call.
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(x)
        tensors = (*self.tensors, x, x, cos, sin, mask, *store.storage, out)
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        strides = [x.stride(0) if len(x) > 1 else 0 for x in (cos, mask)]
        kernels.library().layer(
            LAYER.pack(
                *pointers, b, n, *self.sizes, self.inner, turned, columns, store.capacity,
                *strides, mask.stride(2), self.scale, self.eps, -1.0, *self.modes,
                torch.get_num_threads(),
            )
        )  # fmt: skip
        return out


def activated(activation: nn.Module) -> Tensor:
    """[65536] bfloat16: an activation of each number of 16 bits. Equal tables are one tensor."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return shared(activation(numbers).view(torch.uint16).numpy().tobytes())


@cache
def shared(table: bytes) -> Tensor:
    """[65536] bfloat16 from its bytes."""
    return torch.frombuffer(bytearray(table), dtype=torch.bfloat16)


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Give each decoder layer of a packed model a fused forward, if that has the layer's own output."""
    for layer in model.modules():
        if "self_attn" in dict(layer.named_children()) and kernels.library():
            try:
                fused = FusedLayer(layer)
                alike = has_own_output(fused)
            except Exception:  # a layer of another family: its own code may raise anything
                continue
            if alike:
                layer.forward = fused


def has_own_output(fused: FusedLayer) -> bool:
    """Whether two texts of three nodes behind four columns have the layer's own output, keys and values.

    In bfloat16 they must have its bits. The positions are far, where some models scale queries.
    """
    # 1. Random inputs; node 2 does not see node 1.
    random = torch.Generator().manual_seed(0)
    hidden, dtype = fused.sizes[1], fused.dtype
    sides = []
    inputs = torch.randn(2, 7, hidden, generator=random).to(dtype)
    turns = torch.rand(2, 7, fused.d // 2, generator=random).repeat(1, 1, 2) * 6
    mask = torch.full((7, 7), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[6, 5] = mask.min()

    # 2. Both, in two parts.
    for forward in (fused.own, fused):
        cache, outputs = TreeCache(fused.index + 1, 8), []
        for part in (slice(0, 4), slice(4, 7)):
            places = torch.arange(part.start, part.stop) + (1 << 20)
            outputs.append(
                forward(
                    inputs[:, part],
                    attention_mask=mask[None, None, part, : part.stop],
                    position_ids=places[None],
                    position_embeddings=(turns[:, part].cos().to(dtype), turns[:, part].sin().to(dtype)),
                    past_key_values=cache,
                    use_cache=True,
                )
            )
            cache.tree_layers[fused.index].length = part.stop
        kept = [x[:, :, :7] for x in cache.tree_layers[fused.index].storage]
        sides.append([*outputs, *kept])
    return all(
        torch.equal(own, found) if dtype == torch.bfloat16 else torch.allclose(own, found, 1e-4, 1e-5)
        for own, found in zip(*sides, strict=True)
    )
