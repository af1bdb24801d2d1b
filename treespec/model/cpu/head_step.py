"""Runs a step of an EAGLE head over nodes of several texts as one C call: `head_step` of layer.c.

    [embedding of a token, feature] -> fc -> decoder layer -> state -> output layer -> draft logits

A step of a small head takes as long in Python as its weights take to be read, and a cycle has several steps.
"""

from struct import Struct
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from treespec.kernels import ops as kernels
from treespec.model.cache_layer import TreeLayer
from treespec.model.cpu.decoder_block import HEAD_NORM_NAMES, HEAD_SIGN, LAYER_STRUCT, Block
from treespec.model.cpu.packed_layers import PackedLinear

# `HeadStep` of layer.c: a layer, two products and a pointer
PRODUCT_FORMAT = kernels.LINEAR_STRUCT.format
STEP_STRUCT = Struct(LAYER_STRUCT.format + PRODUCT_FORMAT + PRODUCT_FORMAT + "P")
# `HeadNodes` of layer.c: pointers and sizes
NODES_STRUCT = Struct("15P8l")
# Fields of `Layer` that are 0 in `HeadStep`, since `HeadNodes` has them: x to starts, and turned to mn.
NODE_POINTERS = 9
NODE_SIZES = 9


class StepOutput(NamedTuple):
    """States [R, H] of the nodes; of D nodes the states [D, H] once more, and the draft logits [D, Vd]."""

    states: Tensor
    drafted_states: Tensor
    logits: Tensor


@final
class HeadStep:
    """The weights of a head's step, as `layer.c` takes them.

    Attributes:
        dtype: of embedding, features, states and logits.
    """

    def __init__(
        self, layer: Any, fc: PackedLinear, embedding: Tensor, output: PackedLinear
    ) -> None:
        """Read the weights. Raises errors of many kinds for a layer with other modules, as `Block` does.

        Args:
            layer: the head's packed decoder layer.
            fc: 2 H -> H.
            embedding: [V, H].
            output: H -> Vd.
        """
        self.block = Block(layer, HEAD_NORM_NAMES, HEAD_SIGN)
        self.dtype = self.block.dtype
        self.output = output
        # Keeps the memory alive when parameters are replaced.
        self.tensors = [fc.packed, fc.bias, embedding.detach(), output.packed, output.bias]
        texts = 1
        nodes = 0
        threads = 0
        fields: list[Any] = self.block.pointers + [0] * NODE_POINTERS
        fields += [texts, nodes, *self.block.sizes]
        fields += [0] * NODE_SIZES
        fields += [*self.block.modes, threads]
        for product in (fc, output):
            bias_pointer = 0
            if product.bias is not None:
                bias_pointer = product.bias.data_ptr()
            fields += [product.packed.data_ptr(), bias_pointer]
            fields += [product.in_features, product.out_features]
            fields += [product.form, kernels.BFLOAT16_FLAGS[self.dtype], threads]
        fields.append(embedding.data_ptr())
        self.fields = STEP_STRUCT.pack(*fields)

    def run(
        self,
        tokens: Tensor,
        vocabulary: Tensor | None,
        features: Tensor,
        parents: np.ndarray,
        positions: np.ndarray,
        starts: np.ndarray,
        table: Tensor,
        mask: np.ndarray,
        store: TreeLayer,
        drafted: np.ndarray,
    ) -> StepOutput:
        """Run the step over R nodes of B texts, those of each text together; each text has at most N.

        Keys and values are written at the end of the cache, the first node of each text in the same column.

        Args:
            tokens: [R] int64.
            vocabulary: int64, the target's token for each value of `tokens`; None: it is the value itself.
            features: [M, H].
            parents: [R] int64, the row of the features that precedes each node.
            positions: [R] int64.
            starts: [B + 1] int64, the first node of each text, then R.
            table: [2, positions, R] cos and sin.
            mask: [B, N, U] additive, of the last U columns, as integers of the dtype's size; all nodes see the
                columns before them.
            store: the cache of the layer.
            drafted: [D] int64, the nodes whose logits are computed.
        """
        # 1. Room for what is written.
        batch, most_nodes, masked_columns = mask.shape
        columns = store.length + most_nodes
        store.reserve(columns)
        tokens = tokens.contiguous()
        features = features.contiguous()
        states = features.new_empty(len(tokens), features.shape[1])
        drafted_states = features.new_empty(len(drafted), features.shape[1])
        logits = features.new_empty(len(drafted), self.output.out_features)
        if not store.storage:
            self.block.allocate_storage(store, batch, features)
        keys, values = store.storage

        # 2. Pointers and sizes.
        cos, sin = table
        vocabulary_pointer = 0
        if vocabulary is not None:
            vocabulary_pointer = vocabulary.data_ptr()
        pointers = [tokens.data_ptr()]
        pointers += map(find_address, (parents, positions, starts, drafted))
        pointers += [vocabulary_pointer, features.data_ptr(), cos.data_ptr(), sin.data_ptr()]
        pointers += [find_address(mask), keys.data_ptr(), values.data_ptr()]
        pointers += [states.data_ptr(), drafted_states.data_ptr(), logits.data_ptr()]
        sizes = [batch, most_nodes, len(drafted), cos.shape[1]]
        sizes += [columns, store.capacity, columns - masked_columns, torch.get_num_threads()]
        nodes = NODES_STRUCT.pack(*pointers, *sizes)

        # 3. The call.
        kernels.load_kernels().head_step(self.fields, nodes)
        return StepOutput(states, drafted_states, logits)


def find_address(array: np.ndarray) -> int:
    """Return the address of the first number of a contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address
