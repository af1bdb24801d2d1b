"""Calls of layer.c: consecutive decoder layers, and a step of a draft head, each as one C call.

    layers       x -> layer -> layer -> … -> y
    head step    [embedding of a token, feature] -> fc -> decoder layer -> state -> output layer -> draft logits
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense, check_rows
from treespec.kernels.library import load_kernels
from treespec.kernels.ops import BFLOAT16_FLAGS, PackedWeight, find_stride
from treespec.kernels.structs import LAYER_NORMS, LAYER_PRODUCTS, HeadNodes, HeadStep, Layer, Linear


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

    @cached_property
    def fields(self) -> Layer:
        """The fields that do not change between forwards. Raises KernelInputError if the sizes do not fit."""
        q, k, v, output, gate, up, down = self.products
        heads = output.inputs // self.head_width
        groups = self.kv_heads * self.head_width
        inner = gate.outputs
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
        forms = {product.form for product in self.products}
        if found != sizes or not groups or heads % self.kv_heads or len(forms) > 1:
            raise KernelInputError(f"a layer's products have sizes {found}, not {sizes}, or differ in form")
        vectors = [*self.biases, *self.norms]
        norm_widths = [self.inputs, self.hidden, self.head_width, self.head_width]
        widths = [product.outputs for product in self.products] + norm_widths
        for vector, width in zip(vectors, widths, strict=True):
            if vector is not None:
                check_dense(vector, "a bias or norm", (self.dtype,), (width,))
        for product in self.products:
            product.check()
        return Layer(
            weights=point_at(LAYER_PRODUCTS, [product.numbers for product in self.products]),
            biases=point_at(LAYER_PRODUCTS, self.biases),
            norms=point_at(LAYER_NORMS, self.norms),
            texts=1,
            inputs=self.inputs,
            hidden=self.hidden,
            heads=heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            inner=inner,
            scale=self.scale,
            eps=self.eps,
            sign=self.sign,
            form=q.form,
            half=BFLOAT16_FLAGS[self.dtype],
        )


def point_at(count: int, tensors: Sequence[Tensor | None]) -> "ctypes.Array[ctypes.c_void_p]":
    """Returns the addresses of tensors as an array of C; NULL for None."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * count)(*addresses)


class Columns(NamedTuple):
    """A layer's cache in one forward.

    Attributes:
        keys, values: [B, KV heads, capacity, D]; N columns are written, the last of which is column `end - 1`.
        end: columns after the forward.
        first: the first column that is attended to.
    """

    keys: Tensor
    values: Tensor
    end: int
    first: int

    def check(self, texts: int, layer: LayerWeights) -> None:
        """Raises KernelInputError unless the storage is that of `texts` texts for this layer, with room for `end`."""
        keys = self.keys
        shape = (texts, layer.kv_heads, keys.shape[2], layer.head_width)
        dtypes = (layer.dtype,)
        check_dense(keys, "keys", dtypes, shape)
        check_dense(self.values, "values", dtypes, shape)
        if not 0 <= self.first <= self.end <= shape[2]:
            raise KernelInputError(f"columns {self.first} to {self.end} do not lie in {shape[2]}")


def run_layers(
    layers: Sequence[LayerWeights],
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
        layers: the layers.
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
    # 1. The rows.
    texts, nodes = shape
    first = layers[0]
    rows = texts * nodes
    if starts is not None:
        check_dense(starts, "starts", (torch.int64,), (texts + 1,))
        rows = int(starts[-1])
    check_dense(x, "x", (first.dtype,), (rows, first.inputs))
    check_dense(residual, "the residual", (first.dtype,), (rows, first.hidden))
    out = torch.empty_like(residual)

    # 2. Mask and angles.
    cos, sin = angles
    turned = cos.shape[-1]
    spread = (len(cos), cos.shape[1], turned)
    if spread[0] not in (1, texts) or spread[1] not in (1, nodes):
        raise KernelInputError(f"angles of shape {spread} are not those of {texts} texts of {nodes} nodes")
    if turned % 2 or turned > first.head_width:
        raise KernelInputError(f"{turned} numbers of a head of {first.head_width} cannot be turned")
    for angle in (cos, sin):
        check_rows(angle, "angles", first.dtype, spread)
    if cos.stride() != sin.stride():
        raise KernelInputError("cos and sin have other strides")
    masked = mask.shape[-1]
    check_rows(mask, "the mask", first.dtype, (len(mask), 1, nodes, masked))
    if len(mask) not in (1, texts):
        raise KernelInputError(f"a mask of {len(mask)} texts is not that of {texts}")

    # 3. The fields of each layer. Every layer but the first overwrites its input in place.
    calls = (Layer * len(layers))(*[layer.fields for layer in layers])
    input_pointer = x.data_ptr()
    residual_pointer = residual.data_ptr()
    output_pointer = out.data_ptr()
    cos_pointer = cos.data_ptr()
    sin_pointer = sin.data_ptr()
    mask_pointer = mask.data_ptr()
    starts_pointer = None if starts is None else starts.data_ptr()
    angle_text = find_stride(cos, 0)
    angle_node = find_stride(cos, 1)
    mask_text = find_stride(mask, 0)
    mask_node = mask.stride(2)
    threads = torch.get_num_threads()
    for call, layer, cache in zip(calls, layers, columns, strict=True):
        cache.check(texts, layer)
        free_columns = cache.end - cache.first - masked
        if free_columns < 0 or cache.end < nodes or layer.dtype != first.dtype:
            raise KernelInputError(f"a mask of {masked} columns does not fit {cache.end - cache.first}")
        if layer is not first and not layer.inputs == layer.hidden == first.hidden:
            raise KernelInputError("consecutive layers have other widths")
        call.x = input_pointer
        call.residual = residual_pointer
        call.cos = cos_pointer
        call.sin = sin_pointer
        call.mask = mask_pointer
        call.keys = cache.keys.data_ptr()
        call.values = cache.values.data_ptr()
        call.out = output_pointer
        call.starts = starts_pointer
        call.texts = texts
        call.nodes = nodes
        call.angle_width = turned
        call.columns = cache.end
        call.capacity = cache.keys.shape[2]
        call.first = cache.first
        call.free_columns = free_columns
        call.angle_text = angle_text
        call.angle_node = angle_node
        call.mask_text = mask_text
        call.mask_node = mask_node
        call.threads = threads
        input_pointer = output_pointer
        residual_pointer = output_pointer
    load_kernels().layers(calls, len(layers))
    return out


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a draft head's step.

    Attributes:
        layer: the decoder layer.
        fc: 2 H -> H.
        fc_bias: [H]; None: no bias.
        embedding: [V, H].
        output: H -> Vd.
        output_bias: [Vd]; None: no bias.
    """

    layer: LayerWeights
    fc: PackedWeight
    fc_bias: Tensor | None
    embedding: Tensor
    output: PackedWeight
    output_bias: Tensor | None

    @cached_property
    def fields(self) -> HeadStep:
        """The fields for C. Raises KernelInputError if the sizes do not fit."""
        layer = self.layer
        hidden = layer.hidden
        dtypes = (layer.dtype,)
        check_dense(self.embedding, "the embedding", dtypes, (len(self.embedding), hidden))
        if (self.fc.outputs, self.fc.inputs) != (layer.inputs, 2 * hidden) or layer.inputs != hidden:
            raise KernelInputError("the product before a head's layer has other widths")
        if self.output.inputs != hidden:
            raise KernelInputError("the output layer of a head has another width")
        products = []
        for weight, bias in ((self.fc, self.fc_bias), (self.output, self.output_bias)):
            weight.check()
            if bias is not None:
                check_dense(bias, "a bias", dtypes, (weight.outputs,))
            products.append(
                Linear(
                    weight=weight.numbers.data_ptr(),
                    bias=None if bias is None else bias.data_ptr(),
                    inputs=weight.inputs,
                    outputs=weight.outputs,
                    form=weight.form,
                    half=BFLOAT16_FLAGS[layer.dtype],
                )
            )
        return HeadStep(layer.fields, *products, self.embedding.data_ptr())


class NodeArrays(NamedTuple):
    """What a head's step reads, besides tensors, of the R nodes of B texts; int64, contiguous.

    Attributes:
        parents: [R] by node, the row of its feature.
        positions: [R] of the nodes.
        starts: [B + 1] the first row of each text, then R.
        drafted: [D] the nodes whose logits are computed.
    """

    parents: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    drafted: np.ndarray

    def check(self) -> None:
        """Raises KernelInputError for an array of another type."""
        for name, array in self._asdict().items():
            if array.dtype != np.int64 or not array.flags.c_contiguous:
                raise KernelInputError(f"{name} are {array.dtype}, not contiguous int64")


class StepOutput(NamedTuple):
    """States [R, H] of the nodes; of D nodes the states [D, H] once more, and the draft logits [D, Vd]."""

    states: Tensor
    drafted_states: Tensor
    logits: Tensor


def run_head_step(
    head: HeadWeights,
    tokens: Tensor,
    vocabulary: Tensor | None,
    features: Tensor,
    arrays: NodeArrays,
    table: Tensor,
    mask: np.ndarray,
    columns: Columns,
) -> StepOutput:
    """Runs a head's step over R nodes of B texts, one text after the other; writes keys and values.

    Args:
        head: the weights.
        tokens: [R] int64, draft tokens if there is a vocabulary.
        vocabulary: [Vd] int64, the target's token for each draft token; None: `tokens` are the target's.
        features: [F, H].
        arrays: of the nodes.
        table: [2, positions, turned numbers] cos and sin.
        mask: [B, N, U] additive, of the last U columns, as integers of the dtype's size; all nodes see the columns
            before them. N: the most nodes of a text.
        columns: of the layer.

    Raises:
        KernelInputError: a tensor or an array does not fit.
    """
    # 1. What is read.
    layer = head.layer
    dtypes = (layer.dtype,)
    hidden = layer.hidden
    texts, nodes, masked = mask.shape
    arrays.check()
    rows = len(arrays.parents)
    check_dense(tokens, "tokens", (torch.int64,), (rows,))
    check_dense(features, "features", dtypes, (len(features), hidden))
    vocabulary_pointer = None
    if vocabulary is not None:
        check_dense(vocabulary, "the vocabulary", (torch.int64,), (head.output.outputs,))
        vocabulary_pointer = vocabulary.data_ptr()
    cos, sin = table
    for angle in (cos, sin):
        check_dense(angle, "angles", dtypes, (len(cos), cos.shape[1]))
    columns.check(texts, layer)
    free_columns = columns.end - masked
    if free_columns < 0 or not mask.flags.c_contiguous or mask.itemsize != layer.dtype.itemsize:
        raise KernelInputError(f"a mask {mask.shape} of {mask.dtype} does not fit {columns.end} columns")
    if len(arrays.starts) != texts + 1 or arrays.starts[-1] != rows or len(arrays.positions) != rows:
        raise KernelInputError(f"{rows} nodes have other positions or starts")

    # 2. What is written, and the call.
    states = features.new_empty(rows, hidden)
    drafted_states = features.new_empty(len(arrays.drafted), hidden)
    logits = features.new_empty(len(arrays.drafted), head.output.outputs)
    call = HeadNodes(
        tokens=tokens.data_ptr(),
        parents=find_address(arrays.parents),
        positions=find_address(arrays.positions),
        starts=find_address(arrays.starts),
        drafted=find_address(arrays.drafted),
        vocabulary=vocabulary_pointer,
        features=features.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        mask=find_address(mask),
        keys=columns.keys.data_ptr(),
        values=columns.values.data_ptr(),
        states=states.data_ptr(),
        drafted_states=drafted_states.data_ptr(),
        logits=logits.data_ptr(),
        texts=texts,
        nodes=nodes,
        drafted_nodes=len(arrays.drafted),
        angle_width=cos.shape[1],
        columns=columns.end,
        capacity=columns.keys.shape[2],
        free_columns=free_columns,
        threads=torch.get_num_threads(),
    )
    load_kernels().head_step(ctypes.byref(head.fields), ctypes.byref(call))
    return StepOutput(states, drafted_states, logits)


def find_address(array: np.ndarray) -> int:
    """Returns the address of the first number of a contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address
