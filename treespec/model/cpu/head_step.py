"""Runs a step of an EAGLE head over nodes of several texts as one C call: `head_step` of layer.c.

    [embedding of a token, feature] -> fc -> decoder layer -> state -> output layer -> draft logits

A step of a small head takes as long in Python as its weights take to be read, and a cycle has several steps.
"""

from typing import final

import numpy as np
from torch import Tensor

from treespec.kernels.head_step import (
    HeadWeights,
    NodeArrays,
    OwnProducts,
    StepOutput,
    run_head_step,
)
from treespec.model.cache_layer import TreeLayer
from treespec.model.cpu.decoder_block import reserve_columns


@final
class HeadStep:
    """A head's step.

    Attributes:
        weights: of the step.
        window: positions that a node sees, its own included; None: all.
        dtype: of embedding, features, states and logits.
    """

    def __init__(self, weights: HeadWeights, window: int | None = None) -> None:
        """Raises KernelInputError if the sizes or dtypes of the weights do not fit together."""
        weights.check()
        self.weights = weights
        self.window = window
        self.dtype = weights.layer.dtype

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
        first: int = 0,
        own: OwnProducts | None = None,
    ) -> StepOutput:
        """Run the step over R nodes of B texts, those of each text together; each text has at most N.

        Keys and values are written at the end of the cache, the first node of each text in the same column.

        Args:
            tokens: [R] int64.
            vocabulary: int64, the target's token for each value of `tokens`, before those of `own`; None: it is the
                value itself.
            features: [M, H].
            parents: [R] int64, the row of the features that precedes each node.
            positions: [R] int64.
            starts: [B + 1] int64, the first node of each text, then R.
            table: [2, positions, R] cos and sin.
            mask: [B, N, U] additive, of the last U columns, as integers of the dtype's size; all nodes see the
                columns before them, from `first` on.
            store: the cache of the layer.
            drafted: [D] int64, the nodes whose logits are computed, ascending.
            first: the first column that is attended to.
            own: the output layers of each text's own tokens; None: no text has any.
        """
        batch, most_nodes, _ = mask.shape
        columns = reserve_columns(store, self.weights.layer, batch, most_nodes)
        return run_head_step(
            self.weights,
            tokens.contiguous(),
            vocabulary,
            features.contiguous(),
            NodeArrays(parents, positions, starts, drafted),
            table,
            mask,
            columns._replace(first=first),
            own,
        )
