"""Runs consecutive decoder layers of Llama's family as one C call: `layers` of layer.c.

A forward over one token of a small model spends half of its time between the matrix products: 50 small
operations a layer, and Python. `layer.c` computes a layer in one parallel region.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError
from treespec.kernels.layers import Columns, LayerStack, LayerWeights, run_layers
from treespec.kernels.ops import BFLOAT16_FLAGS
from treespec.model.cache_layer import TreeLayer
from treespec.model.cpu.packed_layers import PackedLinear

PROJECTION_NAMES = [f"self_attn.{name}_proj" for name in "qkvo"]
PROJECTION_NAMES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORM_NAMES = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
HEAD_NORM_NAMES = ["none", *NORM_NAMES[1:]]  # a head's layer gets its input normed
MODEL_SIGN = -1.0  # of the first half's sines: a model's table has both halves alike
HEAD_SIGN = 1.0  # a head's table has the first half's sines negated


class UnfusableError(ValueError):
    """A layer has other modules than those that layer.c computes."""


def read_layer(layer: Any, norm_names: Sequence[str], sign: float) -> LayerWeights:
    """Reads the weights of a packed decoder layer.

    Args:
        layer: the decoder layer.
        norm_names: names of its norms; "none" for a missing one.
        sign: of the first half's sines in the rotary embedding.

    Raises:
        UnfusableError: it has other modules, products that are not packed, or sizes that layer.c does not know.
    """
    # 1. The modules.
    modules = dict(layer.named_modules())
    products = [get_product(modules, name) for name in PROJECTION_NAMES]
    attention = modules["self_attn"]
    head_width = getattr(attention, "head_dim", None)
    eps = getattr(modules.get(NORM_NAMES[1]), "eps", None)
    if type(head_width) is not int or type(eps) is not float:
        raise UnfusableError("it has no width of heads, or no packed norm before its MLP")

    # 2. Biases and norms.
    biases = [detach(product.bias) for product in products]
    norms = [detach(getattr(modules.get(name), "weight", None)) for name in norm_names]
    dtype = find_dtype([*biases, *norms])

    # 3. The sizes.
    weights = LayerWeights(
        products=[product.read_weight() for product in products],
        biases=biases,
        norms=norms,
        head_width=head_width,
        scale=getattr(attention, "scaling", head_width**-0.5),
        eps=eps,
        sign=sign,
        dtype=dtype,
    )
    try:
        weights.check()
    except KernelInputError as error:
        raise UnfusableError(str(error)) from error
    return weights


def get_product(modules: dict[str, Any], name: str) -> PackedLinear:
    """Returns a layer's product by name. Raises UnfusableError if it is not packed."""
    product = modules.get(name)
    if type(product) is not PackedLinear:
        raise UnfusableError(f"{name} is {type(product).__name__}, no packed linear layer")
    return product


def detach(tensor: Tensor | None) -> Tensor | None:
    """Returns a tensor without its gradient; None for None."""
    if tensor is not None:
        tensor = tensor.detach()
    return tensor


def find_dtype(vectors: Sequence[Tensor | None]) -> torch.dtype:
    """Returns the dtype of biases and norms. Raises UnfusableError if they differ, or the kernels do not take it."""
    dtypes = {vector.dtype for vector in vectors if vector is not None}
    if len(dtypes) != 1 or not dtypes <= BFLOAT16_FLAGS.keys():
        raise UnfusableError(f"its biases and norms have dtypes {sorted(map(str, dtypes))}")
    (dtype,) = dtypes
    return dtype


def run_blocks(
    stack: LayerStack,
    x: Tensor,
    residual: Tensor,
    mask: Tensor,
    angles: Sequence[Tensor] | Tensor,
    stores: Sequence[TreeLayer],
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Runs consecutive layers. Returns [B, N, H], in the dtype of their weights; zeros for padding.

    Args:
        stack: the layers.
        x: [B, N, in] input of the first layer.
        residual: [B, N, H], to which the first attention's output is added.
        mask: [B or 1, 1, N, T] additive, of the last columns.
        angles: cos and sin, [B or 1, N or 1, R].
        stores: by layer, its cache, where N columns are written.
        counts: by text, its first nodes; the others are padding, which no layer computes. None: there is none.
    """
    # 1. Storage for the new columns. Every node sees the columns between the first and the mask's.
    batch, nodes, _ = x.shape
    columns = []
    for layer, store in zip(stack.layers, stores, strict=True):
        columns.append(reserve_columns(store, layer, batch, nodes))

    # 2. Without padding, the rows of the nodes lie together.
    shape = (batch, nodes)
    x = x.flatten(0, 1)
    residual = residual.flatten(0, 1)
    if counts is not None and min(counts) < nodes:
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64, device=x.device)
        rows = list_rows(tuple(counts), nodes)
        x = x.index_select(0, rows)
        residual = residual.index_select(0, rows)
        out = run_layers(stack, x, residual, shape, mask, angles, columns, starts)
        padded = out.new_zeros(batch * nodes, out.shape[-1])
        padded.index_copy_(0, rows, out)
        return padded.view(batch, nodes, -1)
    x = x.contiguous()
    residual = residual.contiguous()
    out = run_layers(stack, x, residual, shape, mask, angles, columns)
    return out.view(batch, nodes, -1)


def reserve_columns(store: TreeLayer, layer: LayerWeights, batch: int, nodes: int) -> Columns:
    """Makes room in a layer's cache for `nodes` columns of `batch` texts."""
    end = store.length + nodes
    store.reserve(end)
    if not store.storage:
        shape = (batch, layer.kv_heads, 0, layer.head_width)
        no_columns = torch.empty(shape, dtype=layer.dtype, device="cpu")
        store.lazy_initialization(no_columns, no_columns)
    keys, values = store.storage
    return Columns(keys, values, end, store.first)


@lru_cache(64)
def list_rows(counts: tuple[int, ...], nodes: int) -> Tensor:
    """Return [R] int64 the rows of B texts of `nodes` nodes that are no padding. counts: by text, its first nodes.

    Texts of 3, 1 and 2 nodes:    x x x | x . . | x x .    rows 0 1 2 3 6 7
    """
    rows = list[int]()
    for text, count in enumerate(counts):
        rows += range(text * nodes, text * nodes + count)
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
