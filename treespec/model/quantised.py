"""Sizes and rows of a linear layer or an embedding, whether or not its weight is a plain matrix.

Quantised layers hold blocks, packed bits or tensors of a class of their own. All of them have a
forward, so the rows of such a layer are read off its outputs.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError, first_line

TOKENS = 4096  # of an embedding in a forward
UNITS = 64  # unit vectors in a forward of an output layer: each gives a whole row of logits


def is_plain(module: nn.Module) -> bool:
    """Whether a layer's weight is a matrix of floats that others may read, index and share."""
    return is_plain_weight(getattr(module, "weight", None))


def is_plain_weight(weight: object) -> TypeGuard[nn.Parameter]:
    """Whether a weight holds floats. Tensor classes of quantizers and 8-bit floats do not count."""
    if not isinstance(weight, nn.Parameter) or type(weight) is not nn.Parameter:
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

    Rows of a quantised output embedding are floats, as its forward unpacks them. device: of the
    hidden states. Raises InputError for one that is offloaded, or is no linear layer.
    """
    # 1. The weight [N, H] and the bias [N].
    whole: Any = model.get_output_embeddings()
    start = f"{type(model).__name__} takes no draft vocabulary: its output embedding"
    if isinstance(whole, nn.Linear) and is_plain(whole):
        if whole.weight.is_meta:
            raise InputError(f"{start} is offloaded: give it room on a device")
        wanted = tokens.to(whole.weight.device)
        weight: Tensor = whole.weight[wanted]
        bias: Tensor | None = None if whole.bias is None else whole.bias[wanted]
    else:
        try:
            weight, bias = rows_by_forward(whole, tokens, model.dtype, device)
        except Exception as error:  # any module may stand here
            raise InputError(f"{start} is no linear layer ({first_line(error)})") from error

    # 2. A layer of them.
    rows = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.to(device), requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.to(device), requires_grad=False)
    return rows


def rows_by_forward(
    linear: nn.Module, tokens: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """[N, H] rows and [N] bias of a linear layer of any kind, for the outputs `tokens` [N].

    A forward over unit vectors gives the columns of the weight. dtype, device: of its inputs.
    Raises InputError for a module whose output is no linear function of its input.
    """
    # 1. The bias, then the columns.
    width = sizes_of(linear)[1]
    bias = linear(torch.zeros(1, width, dtype=dtype, device=device))[0]
    wanted = tokens.to(bias.device)
    units, bias = torch.eye(width, dtype=dtype, device=device), bias[wanted]
    columns = [linear(part)[:, wanted] for part in units.split(UNITS)]
    rows = (torch.cat(columns) - bias).T.contiguous()

    # 2. They must give what the layer gives. A layer that rounds its input may differ by that.
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    whole = linear(x)[:, wanted].float()
    difference = (x.to(rows.device) @ rows.T + bias).float() - whole
    if not difference.abs().mean() <= 0.1 * whole.abs().mean():
        raise InputError("its rows do not give its output")
    return rows, bias if bool(bias.any()) else None


@torch.no_grad()
def table_of(embedding: Any) -> Tensor:
    """[V, E] the rows of an embedding: its own weight, or a copy where that is no plain matrix.

    They are as the weight holds them, before any scale that the module applies.
    """
    weight: Tensor = embedding.weight
    if is_plain(embedding):
        return weight
    count, device = embedding.num_embeddings, weight.device
    rows = [embedding(part) for part in torch.arange(count, device=device).split(TOKENS)]
    return torch.cat(rows) / getattr(embedding, "embed_scale", 1.0)
