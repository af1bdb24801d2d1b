"""Linear layers and embeddings whose weight may be no plain matrix.

Quantised layers hold blocks, packed bits or tensors of a class of their own.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError


def is_plain(module: nn.Module) -> bool:
    """Whether a layer's weight is a matrix of floats that others may read, index and share."""
    return is_plain_weight(getattr(module, "weight", None))


def is_plain_weight(weight: object) -> TypeGuard[nn.Parameter]:
    """Whether a weight holds floats. Tensor classes of quantizers and 8-bit floats do not count."""
    if type(weight) is not nn.Parameter:
        return False
    return weight.is_floating_point() and weight.element_size() > 1


def sizes_of(linear: Any) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    if is_plain(linear) or not hasattr(linear, "out_features"):
        out_features, in_features = linear.weight.shape
        return out_features, in_features
    return linear.out_features, linear.in_features


@torch.no_grad()
def rows_of_output(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> nn.Linear:
    """A copy of the output embedding's rows for the tokens [N], a linear layer H -> N.

    device: of the hidden states. Raises InputError for an output embedding that is offloaded,
    quantised, packed or no linear layer.
    """
    whole: Any = model.get_output_embeddings()
    if not isinstance(whole, nn.Linear) or not is_plain(whole) or whole.weight.is_meta:
        raise InputError(
            f"{type(model).__name__} takes no draft vocabulary: its output embedding is offloaded, "
            "quantised or no linear layer; load the plain model by its path, with room on a device"
        )
    rows = nn.Linear(whole.weight.shape[1], len(tokens), whole.bias is not None, device="meta")
    for name, weight in whole.named_parameters():
        own = weight[tokens.to(weight.device)].to(device)
        setattr(rows, name, nn.Parameter(own, requires_grad=False))
    return rows


def table_of(embedding: Any) -> nn.Parameter:
    """[V, E] the rows of an embedding, before any scale that the module applies.

    Raises InputError for one that is quantised.
    """
    if not is_plain(embedding):
        raise InputError("the target's embedding is quantised: take the plain model here")
    weight: nn.Parameter = embedding.weight
    return weight
