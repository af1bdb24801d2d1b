"""Linear layers and embeddings whose weight may be no plain matrix.

Quantised layers hold blocks, packed bits or tensors of a quantiser's class.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError


def is_plain(module: nn.Module) -> bool:
    """Whether a layer's weight is a matrix of floats that other code may read, index and share."""
    return is_plain_weight(
        vars(module)["_parameters"].get("weight")
    )  # an adapter's `weight` is its base layer's


def is_plain_weight(weight: object) -> TypeGuard[nn.Parameter]:
    """Whether a weight holds floats. Tensor classes of quantizers and 8-bit floats do not count."""
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return False
    return weight.element_size() > 1


def get_linear_sizes(linear: Any) -> tuple[int, int]:
    """Return (out, in) of a linear layer."""
    own_weight = vars(linear)["_parameters"].get("weight")
    if hasattr(linear, "out_features") and not is_plain_weight(own_weight):
        return linear.out_features, linear.in_features
    out_features, in_features = linear.weight.shape
    return out_features, in_features


@torch.no_grad()
def copy_output_embedding_rows(
    model: PreTrainedModel, tokens: Tensor, device: torch.device
) -> nn.Linear:
    """Copy the output embedding's rows for the tokens [N] to a linear layer H -> N of floats.

    device: of the hidden states.

    Raises:
        InputError: the output embedding is offloaded, quantised by a library other than torchao, packed, or no linear
            layer.
    """
    output_embedding: Any = model.get_output_embeddings()
    weights: dict[str, nn.Parameter] = {}
    if isinstance(output_embedding, nn.Linear):
        weights = dict(output_embedding.named_parameters())
    is_readable = all(weight.element_size() > 1 for weight in weights.values())
    is_offloaded = any(weight.is_meta for weight in weights.values())
    if "weight" not in weights or is_offloaded or not is_readable:
        raise InputError(
            f"{type(model).__name__} takes no draft vocabulary: its output embedding is offloaded, "
            "quantised or no linear layer; load the plain model by its path, with room on a device"
        )
    rows = nn.Linear(output_embedding.in_features, len(tokens), "bias" in weights, device="meta")
    for name, weight in weights.items():
        selected = weight[tokens.to(weight.device)]
        if not is_plain_weight(weight):
            selected = selected.dequantize().to(weight.dtype)
        setattr(rows, name, nn.Parameter(selected.to(device), requires_grad=False))
    return rows


def get_embedding_width(embedding: Any) -> int:
    """Return the width of an embedding's rows; an adapter around an embedding has no `embedding_dim`."""
    width: int | None = getattr(embedding, "embedding_dim", None)
    if width:
        return width
    return int(embedding.weight.shape[1])


def get_embedding_table(embedding: Any) -> nn.Parameter:
    """Return [V, E] the rows of an embedding, before any scale that the module applies."""
    if is_plain(embedding):
        weight: nn.Parameter = embedding.weight
        return weight
    weight = embedding.weight
    rows = embedding(torch.arange(len(weight), device=weight.device))
    return nn.Parameter(rows / getattr(embedding, "embed_scale", 1.0), requires_grad=False)
