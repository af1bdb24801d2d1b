"""Runs consecutive decoder layers of Llama's family as one C call: `layers` of layer.c.

A forward over one token of a small model spends half of its time between the matrix products: 50 small
operations a layer, and Python. `layer.c` computes a layer in one parallel region.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor

from treespec.kernels import ops as kernels
from treespec.model.cache_layer import TreeLayer

# `Layer` of layer.c: pointers, sizes and strides, numbers, modes
LAYER_STRUCT = Struct("27P17l3f3i")
PROJECTION_NAMES = [f"self_attn.{name}_proj" for name in "qkvo"]
PROJECTION_NAMES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORM_NAMES = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
HEAD_NORM_NAMES = ["none", *NORM_NAMES[1:]]  # a head's layer gets its input normed
MODEL_SIGN = -1.0  # of the first half's sines: a model's table has both halves alike
HEAD_SIGN = 1.0  # a head's table has the first half's sines negated


@final
class Block:
    """Weights and sizes of a packed decoder layer, as `layer.c` takes them.

    Attributes:
        dtype: of inputs and outputs.
        hidden: width of the output.
        kv_heads: heads of keys and values.
        head_width: of queries, keys and values.
        pointers: of packed weights, biases and norms, 0 for a missing one.
        sizes: widths and heads.
        modes: numbers and modes before the number of threads.
    """

    def __init__(self, layer: Any, norm_names: list[str], sign: float) -> None:
        """Read the weights of a layer. Raises errors of many kinds for a layer with other modules.

        Args:
            layer: a packed decoder layer.
            norm_names: names of its norms; "none" for a missing one.
            sign: of the first half's sines in the rotary embedding.
        """
        # 1. The modules.
        modules = dict(layer.named_modules())
        products = [modules[name] for name in PROJECTION_NAMES]
        attention = layer.self_attn
        check_widths(products, attention.head_dim)
        vectors = [product.bias for product in products]
        for name in norm_names:
            norm = modules.get(name)
            vectors.append(getattr(norm, "weight", None))
        self.dtype = read_dtype(vectors)

        # 2. Sizes and modes.
        q, _, v, output, gate, _, _ = products
        self.hidden = gate.in_features
        self.head_width = attention.head_dim
        self.kv_heads = v.out_features // self.head_width
        heads = output.in_features // self.head_width
        self.sizes = (
            q.in_features,
            self.hidden,
            heads,
            self.kv_heads,
            self.head_width,
            gate.out_features,
        )
        self.modes = (
            getattr(attention, "scaling", self.head_width**-0.5),
            layer.post_attention_layernorm.eps,
            sign,
            read_weight_form(products),
            kernels.BFLOAT16_FLAGS[self.dtype],
        )

        # 3. Pointers. `tensors` keeps their memory alive when the layer's parameters are replaced.
        self.tensors: list[Tensor] = []
        self.pointers: list[int] = []
        for tensor in [*(product.packed for product in products), *vectors]:
            pointer = 0
            if tensor is not None:
                self.tensors.append(tensor.detach())
                pointer = tensor.data_ptr()
            self.pointers.append(pointer)

    def allocate_storage(self, store: TreeLayer, batch: int, like: Tensor) -> None:
        """Allocate keys and values in the layer's empty cache.

        Args:
            store: the cache.
            batch: sequences.
            like: a tensor of the dtype and device of keys and values.
        """
        no_columns = like.new_empty(batch, self.kv_heads, 0, self.head_width)
        store.lazy_initialization(no_columns, no_columns)


def check_widths(products: Sequence[Any], head_width: int) -> None:
    """Raise ValueError for gated queries, and for keys, values or an MLP of widths that layer.c does not know.

    products: as in `PROJECTION_NAMES`.
    """
    q, k, v, output, gate, _, down = products
    if q.out_features != output.in_features or k.out_features != v.out_features:
        raise ValueError
    if down.in_features != gate.out_features or v.out_features < head_width:
        raise ValueError


def read_dtype(vectors: Sequence[Tensor | None]) -> torch.dtype:
    """Return the dtype of biases and norms. Raises ValueError if they differ or are all missing."""
    (dtype,) = {vector.dtype for vector in vectors if vector is not None}
    return dtype


def read_weight_form(products: Sequence[Any]) -> int:
    """Return the form of the packed weights. Raises ValueError if they differ."""
    (form,) = {product.form for product in products}
    return form


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    residual: Tensor,
    mask: Tensor,
    angles: Sequence[Tensor] | Tensor,
    stores: Sequence[TreeLayer],
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Run consecutive layers. Returns [B, N, H], in the dtype of their weights; zeros for padding.

    Args:
        blocks: the layers.
        x: [B, N, in] input of the first layer.
        residual: [B, N, H], to which the first attention's output is added.
        mask: [B or 1, 1, N, T] additive, of the last columns.
        angles: cos and sin, [B or 1, N or 1, R].
        stores: by layer, its cache, where N columns are written.
        counts: by text, its first nodes; the others are padding, which no layer computes. None: there is none.
    """
    # 1. Without padding, the rows of the nodes lie together.
    batch, nodes, _ = x.shape
    if counts is not None and min(counts) < nodes:
        starts = torch.tensor([0, *accumulate(counts)])
        rows = list_rows(tuple(counts), nodes)
        x = x.flatten(0, 1).index_select(0, rows)
        residual = residual.flatten(0, 1).index_select(0, rows)
        out = call_blocks(blocks, x, residual, (batch, nodes), mask, angles, stores, starts)
        padded = out.new_zeros(batch, nodes, out.shape[-1])
        padded.flatten(0, 1).index_copy_(0, rows, out)
        return padded
    out = call_blocks(blocks, x, residual, (batch, nodes), mask, angles, stores, None)
    return out.view(batch, nodes, -1)


@lru_cache(64)
def list_rows(counts: tuple[int, ...], nodes: int) -> Tensor:
    """Return [R] int64 the rows of B texts of `nodes` nodes that are no padding. counts: by text, its first nodes.

    Texts of 3, 1 and 2 nodes:    x x x | x . . | x x .    rows 0 1 2 3 6 7
    """
    rows = list[int]()
    for text, count in enumerate(counts):
        rows += range(text * nodes, text * nodes + count)
    return torch.tensor(rows)


def call_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    residual: Tensor,
    shape: tuple[int, int],
    mask: Tensor,
    angles: Sequence[Tensor] | Tensor,
    stores: Sequence[TreeLayer],
    starts: Tensor | None,
) -> Tensor:
    """As `run_blocks`. Returns [R, H].

    Args:
        blocks, mask, angles, stores: as for `run_blocks`.
        x, residual: [..., in] and [..., H] of the R rows.
        shape: B texts and N nodes, with padding.
        starts: [B + 1] int64, the first row of each text, then R; None: no padding.
    """
    # 1. What all layers share.
    cos, sin = angles
    batch, nodes = shape
    x = x.contiguous()
    residual = residual.contiguous()
    out = torch.empty_like(residual)
    input_pointer = x.data_ptr()
    residual_pointer = residual.data_ptr()
    output_pointer = out.data_ptr()
    shared_pointers = [cos.data_ptr(), sin.data_ptr(), mask.data_ptr()]
    starts_pointer = 0
    if starts is not None:
        starts_pointer = starts.data_ptr()
    angle_width = cos.shape[-1]
    mask_columns = mask.shape[-1]
    strides = [kernels.find_stride(cos, 0), kernels.find_stride(cos, 1)]
    strides += [kernels.find_stride(mask, 0), mask.stride(2)]
    threads = torch.get_num_threads()

    calls = bytearray()
    for block, store in zip(blocks, stores, strict=True):
        # 2. Storage for the new columns.
        columns = store.length + nodes
        store.reserve(columns)
        if not store.storage:
            block.allocate_storage(store, batch, x)
        keys, values = store.storage

        # 3. Pointers and sizes of the layer. Every node sees the columns between the first and the mask's.
        pointers = [*block.pointers, input_pointer, residual_pointer, *shared_pointers]
        pointers += [keys.data_ptr(), values.data_ptr(), output_pointer, starts_pointer]
        first = store.first
        free_columns = columns - first - mask_columns
        sizes = [batch, nodes, *block.sizes, angle_width]
        sizes += [columns, store.capacity, first, free_columns]
        calls += LAYER_STRUCT.pack(*pointers, *sizes, *strides, *block.modes, threads)

        # 4. The next layer overwrites this one's output in place.
        input_pointer = output_pointer
        residual_pointer = output_pointer
    kernels.load_kernels().layers(bytes(calls), len(blocks))
    return out
