"""Runs a step of a draft head as one C call, `head_step` of layer.c.

EAGLE-1: [embedding of a token, feature] -> fc -> decoder layer -> state -> output layer -> draft logits
EAGLE-3: [norm(embedding), norm(feature)] -> decoder layer -> state -> norm -> output layer -> draft logits
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense
from treespec.kernels.layers import Columns, LayerWeights, list_addresses
from treespec.kernels.library import load_kernels
from treespec.kernels.ops import BFLOAT16_FLAGS, PackedWeight
from treespec.kernels.structs import (
    HEAD_NORMS,
    HeadNodesStruct,
    HeadStepStruct,
    LinearStruct,
)
from treespec.kernels.threads import count_threads


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a draft head's step.

    Attributes:
        layer: the decoder layer.
        embedding: [V, H]; or packed in blocks, with V outputs of H inputs.
        output: H -> Vd.
        output_bias: [Vd]; None: no bias.
        fc: 2 H -> H; None: the layer's attention reads embedding and feature, and its output is added to the feature.
        fc_bias: [H]; None: no bias.
        norms: of embeddings, of features, of the states that the output layer reads, [H] each; None: no norm.
        adds_normed_feature: whether the layer adds its attention to the normed feature.
        returns_normed_states: whether the states, which are the features of the next step, are the normed ones.
    """

    layer: LayerWeights
    embedding: Tensor | PackedWeight
    output: PackedWeight
    output_bias: Tensor | None
    fc: PackedWeight | None = None
    fc_bias: Tensor | None = None
    norms: Sequence[Tensor | None] = (None,) * HEAD_NORMS
    adds_normed_feature: bool = False
    returns_normed_states: bool = False

    def check(self) -> None:
        """Raises KernelInputError if the sizes or dtypes of the weights do not fit together."""
        # 1. The layer, and what it reads.
        layer = self.layer
        hidden = layer.hidden
        layer.check()
        layer_inputs = 2 * hidden
        if self.fc is not None:
            check_product(self.fc, self.fc_bias, (hidden, 2 * hidden), layer.dtype)
            layer_inputs = hidden
        if layer.inputs != layer_inputs:
            raise KernelInputError(
                f"a head's layer reads {layer.inputs} numbers, not {layer_inputs}"
            )

        # 2. The others.
        check_product(self.output, self.output_bias, (self.output.outputs, hidden), layer.dtype)
        if isinstance(self.embedding, PackedWeight):
            check_product(self.embedding, None, (self.embedding.outputs, hidden), layer.dtype)
        else:
            embedding_shape = (len(self.embedding), hidden)
            check_dense(self.embedding, "the embedding", (layer.dtype,), embedding_shape)
        for norm in self.norms:
            if norm is not None:
                check_dense(norm, "a norm", (layer.dtype,), (hidden,))
        if self.returns_normed_states and self.norms[-1] is None:
            raise KernelInputError("a head without a norm of its states cannot return them normed")

    @cached_property
    def fields(self) -> HeadStepStruct:
        """The fields for C. Raises KernelInputError as `check` does."""
        self.check()
        fc = LinearStruct()
        if self.fc is not None:
            fc = build_product(self.fc, self.fc_bias, self.layer.dtype)
        return HeadStepStruct(
            layer=self.layer.fields,
            fc=fc,
            output=build_product(self.output, self.output_bias, self.layer.dtype),
            embedding=build_embedding(self.embedding, self.layer.dtype),
            norms=list_addresses(HEAD_NORMS, self.norms),
            adds_normed_feature=self.adds_normed_feature,
            returns_normed_states=self.returns_normed_states,
        )


def build_embedding(embedding: Tensor | PackedWeight, dtype: torch.dtype) -> LinearStruct:
    """Returns the fields of an embedding for C. Its rows stand in the place of a weight, if it is not packed."""
    if isinstance(embedding, PackedWeight):
        return build_product(embedding, None, dtype)
    rows, width = embedding.shape
    return LinearStruct(weight=embedding.data_ptr(), inputs=width, outputs=rows)


def build_product(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> LinearStruct:
    """Returns the fields of a product for C. dtype: of rows and bias."""
    product = LinearStruct(
        weight=weight.numbers.data_ptr(),
        inputs=weight.inputs,
        outputs=weight.outputs,
        form=weight.form,
        half=BFLOAT16_FLAGS[dtype],
    )
    if bias is not None:
        product.bias = bias.data_ptr()
    return product


def check_product(
    weight: PackedWeight, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Raises KernelInputError for a weight of another shape than [outputs, inputs], or a bias of another dtype."""
    if (weight.outputs, weight.inputs) != shape:
        raise KernelInputError(
            f"a product of a head has {weight.outputs} outputs and {weight.inputs} inputs, not {shape}"
        )
    weight.check()
    if bias is not None:
        check_dense(bias, "a bias", (dtype,), (weight.outputs,))


class OwnProducts:
    """The output layers of B texts' own draft tokens, which stand behind those of the head's output layer.

    Attributes:
        tokens: [B, W] int64, the target's.
        fields: for C.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        head: HeadWeights,
    ) -> None:
        """weights: H -> W. Raises KernelInputError for tokens, weights or biases of other sizes."""
        self.texts, self.outputs = tokens.shape
        self.tokens = tokens
        self.kept = (weights, biases)  # C reads their memory
        if tokens.dtype != np.int64 or not tokens.flags.c_contiguous:
            raise KernelInputError(f"own tokens are {tokens.dtype}, not contiguous int64")
        shape = (self.outputs, head.layer.hidden)
        dtype = head.layer.dtype
        products = []
        for weight, bias in zip(weights, biases, strict=True):
            check_product(weight, bias, shape, dtype)
            products.append(build_product(weight, bias, dtype))
        self.fields = (LinearStruct * self.texts)(*products)


class NodeArrays(NamedTuple):
    """What a head's step reads, besides tensors, of the R nodes of B texts; int64, contiguous.

    Attributes:
        parents: [R] by node, the row of its feature.
        positions: [R] of the nodes.
        starts: [B + 1] the first row of each text, then R.
        drafted: [D] the nodes whose logits are computed, ascending.
    """

    parents: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    drafted: np.ndarray

    def check(self, texts: int) -> None:
        """Raises KernelInputError for arrays of another type, or that are not of `texts` texts."""
        for name, array in self._asdict().items():
            if array.dtype != np.int64 or not array.flags.c_contiguous:
                raise KernelInputError(f"{name} are {array.dtype}, not contiguous int64")
        rows = len(self.parents)
        has_starts = len(self.starts) == texts + 1 and self.starts[-1] == rows
        if not has_starts or len(self.positions) != rows:
            raise KernelInputError(f"{rows} nodes have other positions or starts")


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
    own: OwnProducts | None = None,
) -> StepOutput:
    """Runs a head's step over R nodes of B texts, one text after the other; writes keys and values.

    Args:
        head: the weights.
        tokens: [R] int64, draft tokens if there is a vocabulary.
        vocabulary: [Vd] int64, the target's token for each draft token, before those of `own`; None: `tokens` are the
            target's.
        features: [F, H].
        arrays: of the nodes.
        table: [2, positions, turned numbers] cos and sin.
        mask: [B, N, U] additive, of the last U columns, as integers of the dtype's size; all nodes see the columns
            before them, from the first on that is attended to. N: the most nodes of a text.
        columns: of the layer.
        own: draft tokens of each text, behind the others; None: no text has any.

    Raises:
        KernelInputError: a tensor or an array does not fit.
    """
    # 1. What is read.
    layer = head.layer
    dtypes = (layer.dtype,)
    hidden = layer.hidden
    texts, nodes, masked_columns = mask.shape
    rows = len(arrays.parents)
    arrays.check(texts)
    check_dense(tokens, "tokens", (torch.int64,), (rows,))
    check_dense(features, "features", dtypes, (len(features), hidden))
    vocabulary_pointer = None
    if vocabulary is not None:
        check_dense(vocabulary, "the vocabulary", (torch.int64,), (head.output.outputs,))
        vocabulary_pointer = vocabulary.data_ptr()
    draft_tokens = head.output.outputs
    own_pointer = None
    own_tokens = None
    if own is not None:
        if own.texts != texts:
            raise KernelInputError(f"{own.texts} texts have tokens of their own, not {texts}")
        draft_tokens += own.outputs
        own_pointer = ctypes.addressof(own.fields)
        own_tokens = find_address(own.tokens)
    cos, sin = table
    for angle in (cos, sin):
        check_dense(angle, "angles", dtypes, (len(cos), cos.shape[1]))
    columns.check((texts, nodes), masked_columns, layer)
    if not mask.flags.c_contiguous or mask.itemsize != layer.dtype.itemsize:
        raise KernelInputError(f"a mask of {mask.dtype} is not one of {layer.dtype}")

    # 2. What is written, and the call.
    states = features.new_empty(rows, hidden)
    drafted_states = features.new_empty(len(arrays.drafted), hidden)
    logits = features.new_empty(len(arrays.drafted), draft_tokens)
    call = HeadNodesStruct(
        tokens=tokens.data_ptr(),
        parents=find_address(arrays.parents),
        positions=find_address(arrays.positions),
        starts=find_address(arrays.starts),
        drafted=find_address(arrays.drafted),
        vocabulary=vocabulary_pointer,
        own=own_pointer,
        own_tokens=own_tokens,
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
        first_column=columns.first,
        free_columns=columns.end - masked_columns,
        threads=count_threads(),
    )
    load_kernels().head_step(ctypes.byref(head.fields), ctypes.byref(call))
    return StepOutput(states, drafted_states, logits)


def find_address(array: np.ndarray) -> int:
    """Returns the address of the first number of a contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address
