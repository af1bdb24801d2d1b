"""Runs consecutive decoder layers as one C call, `layers` of layer.c: x -> layer -> layer -> … -> y."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import NamedTuple, final

import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense, check_rows
from treespec.kernels.library import load_kernels
from treespec.kernels.ops import BFLOAT16_FLAGS, Q8_0, PackedWeight, find_stride
from treespec.kernels.structs import (
    CACHE_FORMAT,
    LAYER_NORMS,
    LAYER_PRODUCTS,
    ForwardStruct,
    LayerStruct,
)
from treespec.kernels.threads import count_threads

# A layer's products of the same rows: queries, keys and values; gate and up.
SAME_ROWS = (slice(0, 3), slice(4, 6))


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer of Llama's family.

    Attributes:
        products: of queries, keys, values, output, gate, up and down.
        biases: of the products, [out] each; None: no bias.
        norms: before attention, before the MLP, of queries, of keys; None: no norm.
        head_width: of queries, keys and values.
        scale: factor on the scores of attention.
        eps: of the norms.
        sign: of the first half's sines in the rotary embedding: -1, or 1 if they are negated already.
        dtype: of inputs, outputs, biases and norms: bfloat16 or float32.
    """

    products: Sequence[PackedWeight]
    biases: Sequence[Tensor | None]
    norms: Sequence[Tensor | None]
    head_width: int
    scale: float
    eps: float
    sign: float
    dtype: torch.dtype

    @property
    def inputs(self) -> int:
        """Width of the attention's input."""
        return self.products[0].inputs

    @property
    def hidden(self) -> int:
        """Width of the output."""
        return self.products[4].inputs

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.products[2].outputs // self.head_width

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.products[3].inputs // self.head_width

    @property
    def inner(self) -> int:
        """Width between the MLP's products."""
        return self.products[4].outputs

    def check(self) -> None:
        """Raises KernelInputError if the sizes or dtypes of the weights do not fit together."""
        heads = self.heads
        inner = self.inner
        groups = self.kv_heads * self.head_width
        sizes = (
            (heads * self.head_width, self.inputs),
            (groups, self.inputs),
            (groups, self.inputs),
            (self.hidden, heads * self.head_width),
            (inner, self.hidden),
            (inner, self.hidden),
            (self.hidden, inner),
        )
        found = tuple((product.outputs, product.inputs) for product in self.products)
        if found != sizes or not groups or heads % self.kv_heads:
            raise KernelInputError(f"a layer's products have sizes {found}, not {sizes}")
        for same_rows in SAME_ROWS:
            forms = {min(product.form, Q8_0) for product in self.products[same_rows]}
            if len(forms) > 1:
                raise KernelInputError("a layer's products read the same rows in several forms")
        vectors = [*self.biases, *self.norms]
        norm_widths = [self.inputs, self.hidden, self.head_width, self.head_width]
        widths = [product.outputs for product in self.products] + norm_widths
        for vector, width in zip(vectors, widths, strict=True):
            if vector is not None:
                check_dense(vector, "a bias or norm", (self.dtype,), (width,))
        for product in self.products:
            product.check()

    @cached_property
    def fields(self) -> LayerStruct:
        """The fields for C. Raises KernelInputError as `check` does."""
        self.check()
        return LayerStruct(
            weights=list_addresses(LAYER_PRODUCTS, [product.numbers for product in self.products]),
            biases=list_addresses(LAYER_PRODUCTS, self.biases),
            norms=list_addresses(LAYER_NORMS, self.norms),
            inputs=self.inputs,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            inner=self.inner,
            scale=self.scale,
            eps=self.eps,
            sign=self.sign,
            forms=(ctypes.c_int * LAYER_PRODUCTS)(*[product.form for product in self.products]),
            half=BFLOAT16_FLAGS[self.dtype],
        )


def list_addresses(count: int, tensors: Sequence[Tensor | None]) -> "ctypes.Array[ctypes.c_void_p]":
    """Returns the addresses of tensors as an array of C; NULL for None."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * count)(*addresses)


@final
class LayerStack:
    """Consecutive layers that one call runs.

    Attributes:
        layers: the layers.
        fields: of all layers, for C.
        cache_format: of their caches.
    """

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        """Raises KernelInputError unless each layer takes what the one before gives."""
        first = layers[0]
        for layer in layers[1:]:
            if layer.dtype != first.dtype or not layer.inputs == layer.hidden == first.hidden:
                raise KernelInputError("consecutive layers have other widths or dtypes")
        self.layers = tuple(layers)
        self.fields = (LayerStruct * len(layers))(*[layer.fields for layer in layers])
        self.cache_format = Struct(CACHE_FORMAT * len(layers))


class Columns(NamedTuple):
    """A layer's cache in one forward.

    Attributes:
        keys, values: [B, KV heads, capacity, D]; the forward writes the N columns before `end`.
        end: columns after the forward.
        first: the first column that is attended to.
    """

    keys: Tensor
    values: Tensor
    end: int
    first: int

    def check(self, shape: tuple[int, int], masked_columns: int, layer: LayerWeights) -> None:
        """Raises KernelInputError unless the storage fits a forward over B texts and N nodes.

        Args:
            shape: B and N.
            masked_columns: of the mask, the last ones.
            layer: whose keys and values these are.
        """
        texts, nodes = shape
        capacity = self.keys.shape[2]
        storage_shape = (texts, layer.kv_heads, capacity, layer.head_width)
        dtypes = (layer.dtype,)
        check_dense(self.keys, "keys", dtypes, storage_shape)
        check_dense(self.values, "values", dtypes, storage_shape)
        is_inside = self.first >= 0 and nodes <= self.end <= capacity
        if not is_inside or self.first + masked_columns > self.end:
            raise KernelInputError(
                f"columns {self.first} to {self.end} of {capacity} do not fit {nodes} nodes and a mask of "
                f"{masked_columns} columns"
            )


def run_layers(
    stack: LayerStack,
    x: Tensor,
    residual: Tensor,
    shape: tuple[int, int],
    mask: Tensor,
    angles: Sequence[Tensor] | Tensor,
    columns: Sequence[Columns],
    starts: Tensor | None = None,
) -> Tensor:
    """Runs consecutive layers over R rows. Returns [R, H], and writes keys and values.

    Args:
        stack: the layers.
        x: [R, in] input of the first layer's attention.
        residual: [R, H], to which the first attention's output is added.
        shape: B texts and N nodes, with padding.
        mask: [B or 1, 1, N, T] additive, of the last T columns; all nodes see the earlier ones.
        angles: cos and sin, [B or 1, N or 1, turned numbers of a head].
        columns: of each layer.
        starts: [B + 1] int64, the first row of each text, then R; None: R is B N, without padding.

    Raises:
        KernelInputError: a tensor does not fit.
    """
    # 1. The rows, mask and angles.
    texts, nodes = shape
    first = stack.layers[0]
    rows = texts * nodes
    starts_pointer = None
    if starts is not None:
        check_dense(starts, "starts", (torch.int64,), (texts + 1,))
        rows = int(starts[-1])
        starts_pointer = starts.data_ptr()
    check_dense(x, "x", (first.dtype,), (rows, first.inputs))
    check_dense(residual, "the residual", (first.dtype,), (rows, first.hidden))
    cos, sin = angles
    check_angles(cos, sin, shape, first)
    check_rows(mask, "the mask", first.dtype, (len(mask), 1, nodes, mask.shape[-1]))
    if len(mask) not in (1, texts):
        raise KernelInputError(f"a mask of {len(mask)} texts is not that of {texts}")

    # 2. The caches.
    masked_columns = mask.shape[-1]
    numbers = list[int]()
    for layer, cache in zip(stack.layers, columns, strict=True):
        cache.check(shape, masked_columns, layer)
        numbers += cache.keys.data_ptr(), cache.values.data_ptr()
        numbers += cache.end, cache.keys.shape[2], cache.first

    # 3. The call.
    out = torch.empty_like(residual)
    forward = ForwardStruct(
        x.data_ptr(),
        residual.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        mask.data_ptr(),
        out.data_ptr(),
        starts_pointer,
        texts,
        nodes,
        cos.shape[-1],
        masked_columns,
        find_stride(cos, 0),
        find_stride(cos, 1),
        find_stride(mask, 0),
        mask.stride(2),
        count_threads(),
    )
    caches = stack.cache_format.pack(*numbers)
    load_kernels().layers(stack.fields, caches, len(stack.layers), ctypes.byref(forward))
    return out


def check_angles(cos: Tensor, sin: Tensor, shape: tuple[int, int], layer: LayerWeights) -> None:
    """Raises KernelInputError unless cos and sin are those of B texts and N nodes for a layer's heads.

    shape: B and N.
    """
    texts, nodes = shape
    turned = cos.shape[-1]
    spread = (len(cos), cos.shape[1], turned)
    if spread[0] not in (1, texts) or spread[1] not in (1, nodes):
        raise KernelInputError(f"angles {spread} are not those of {texts} texts of {nodes} nodes")
    if turned % 2 or turned > layer.head_width:
        raise KernelInputError(f"{turned} numbers of a head of {layer.head_width} cannot be turned")
    for angle in (cos, sin):
        check_rows(angle, "angles", layer.dtype, spread)
    if cos.stride() != sin.stride():
        raise KernelInputError("cos and sin have other strides")
