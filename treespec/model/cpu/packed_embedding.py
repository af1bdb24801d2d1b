"""The embedding of a model in eight or four bits: rows of a product. One that is tied to the output layer is held once.

the model has                      packed
an embedding and an output layer   two weights in blocks
one weight for both, "tied"        the output layer in blocks, whose rows are the embedding
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.kernels.eight_bits import read_outputs
from treespec.kernels.ops import PackedWeight
from treespec.model.cpu.packed_layers import PackedLinear, has_own_code
from treespec.model.cpu.packing import replace_layers
from treespec.model.quantization.layers import is_plain

EMBEDDING_PRODUCT = "the embedding"  # its name as a product


@final
class PackedEmbedding(nn.Module):
    """`nn.Embedding` for inference on a CPU, whose rows are those of a product in blocks.

    To code outside it is an embedding of floats: `weight` and `state_dict` unpack, loading packs again. One that is
    tied loads nothing: the output layer is loaded.

    Attributes:
        products: the product, in a tuple, so that it is no part of this module.
        is_tied: whether it is the output layer.
        packed: the product's weight, if it is of this embedding alone.
        num_embeddings, embedding_dim: V, H.
        dtype: of the rows.
    """

    def __init__(self, product: PackedLinear, dtype: torch.dtype, is_tied: bool) -> None:
        super().__init__()
        self.products = (product,)
        self.is_tied = is_tied
        self.num_embeddings = product.out_features
        self.embedding_dim = product.in_features
        self.dtype = dtype
        if not is_tied:
            self.packed = product.packed

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        rows = read_outputs(self.read_weight(), tokens.flatten().contiguous(), self.dtype)
        return rows.unflatten(0, tokens.shape)

    def read_weight(self) -> PackedWeight:
        """Returns the packed weight, as the kernels take it."""
        (product,) = self.products
        return product.read_weight()

    @property
    def weight(self) -> Tensor:
        """[V, H], a copy: a change of it does not change the layer."""
        (product,) = self.products
        return product.weight.to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedEmbedding":
        """Applies `fn` of `Module.to`, `float` and the like; other devices are refused."""
        if not self.is_tied:
            self.products[0]._apply(fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Writes `weight`, as `nn.Embedding` does."""
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
        """Reads `weight`, as the product does; nothing if it is tied."""
        if not self.is_tied:
            (product,) = self.products
            product._load_from_state_dict(state_dict, prefix, *more)
            self.packed = product.packed


def replace_products(model: Any, replace: Callable[[Any, str], nn.Module]) -> None:
    """Replace the products of a model, then its embedding, if it only copies rows.

    replace: as for `replace_layers`. It packs an embedding that is not tied to the output layer as a linear layer
        without bias, named EMBEDDING_PRODUCT.
    """
    # 1. The products.
    if not hasattr(model, "get_output_embeddings"):
        replace_layers(model, replace)
        return
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    is_rows = copies_rows(embedding)
    is_tied = is_rows and isinstance(output, nn.Linear) and output.weight is embedding.weight
    replace_layers(model, replace)

    # 2. The embedding.
    if not is_rows:
        return
    if is_tied:
        product = model.get_output_embeddings()
    else:
        rows, width = embedding.weight.shape
        layer = nn.Linear(width, rows, bias=False, device="meta")
        layer.weight = embedding.weight
        product = replace(layer, EMBEDDING_PRODUCT)
    if type(product) is PackedLinear and product.is_rounded and product.bias is None:
        dtype = embedding.weight.dtype
        model.set_input_embeddings(PackedEmbedding(product, dtype, is_tied))


def copies_rows(embedding: Any) -> bool:
    """Whether an embedding only copies rows of floats: it scales none, and has no hooks."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    return has_own_code(embedding) and is_plain(embedding)
