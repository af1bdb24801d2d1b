"""The embedding of a model whose output layer has the same weight, in eight or four bits, so that it is held once.

before     embedding [V, H] of floats,  output layer [V, H] of floats: one tensor, "tied"
rounded    embedding [V, H] of floats,  output layer [V, H] in blocks: two
here       rows of the output layer,    output layer [V, H] in blocks: one
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.kernels.eight_bits import read_outputs
from treespec.kernels.ops import PackedWeight
from treespec.model.cpu.packed_layers import PackedLinear, has_own_code


@final
class PackedEmbedding(nn.Module):
    """`nn.Embedding` for inference on a CPU, whose rows are those of a packed output layer in blocks.

    To code outside it is an embedding of floats: `weight` and `state_dict` unpack. Loading changes nothing here: the
    output layer is loaded.

    Attributes:
        tied: the output layer, in a tuple, so that it is no part of this module.
        num_embeddings, embedding_dim: V, H.
        dtype: of the rows.
    """

    def __init__(self, output: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.tied = (output,)
        self.num_embeddings = output.out_features
        self.embedding_dim = output.in_features
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        rows = read_outputs(self.read_weight(), tokens.flatten().contiguous(), self.dtype)
        return rows.unflatten(0, tokens.shape)

    def read_weight(self) -> PackedWeight:
        """Returns the packed weight, as the kernels take it."""
        (output,) = self.tied
        return output.read_weight()

    @property
    def weight(self) -> Tensor:
        """[V, H], a copy: a change of it does not change the layer."""
        (output,) = self.tied
        return output.weight.to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedEmbedding":
        """Applies `fn` of `Module.to`, `float` and the like; the output layer refuses other devices."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Writes `weight`, as `nn.Embedding` does."""
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Reads nothing."""


@contextmanager
def sharing_tied_rows(model: Any) -> Iterator[None]:
    """Let the embedding read the rows of the output layer, if the two are tied and the block rounds that layer.

    Embeddings that scale, and those with hooks, stay as they are.
    """
    embedding: Any = None
    output: Any = None
    if hasattr(model, "get_output_embeddings"):
        embedding = model.get_input_embeddings()
        output = model.get_output_embeddings()
    is_tied = (
        type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and has_own_code(embedding)
        and type(output) is nn.Linear
        and output.bias is None
        and output.weight is embedding.weight
    )
    yield
    if not is_tied:
        return
    output = model.get_output_embeddings()
    if type(output) is PackedLinear and output.is_rounded:
        model.set_input_embeddings(PackedEmbedding(output, embedding.weight.dtype))
