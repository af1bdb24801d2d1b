"""The residual block of Medusa's and Hydra's heads."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class ResBlock(nn.Module):
    """x + SiLU(W x + b), W zero at the start; of several inputs side by side, R x + r + SiLU(W x + b).

    R passes the first input on at the start.
    """

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width)
        nn.init.zeros_(self.linear.weight)
        self.res_connection: nn.Module = nn.Identity()
        if inputs > 1:
            first = nn.Linear(inputs * width, width)
            with torch.no_grad():
                first.weight.copy_(torch.eye(width, inputs * width))
            nn.init.zeros_(first.bias)
            self.res_connection = first

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs * H] -> [..., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


def keep_rows(layer: nn.Linear, tokens: Tensor) -> None:
    """An output layer, H -> V, of the tokens [N] alone, H -> N; without gradient."""
    layer.out_features = len(tokens)
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(value.detach()[tokens.to(value.device)], requires_grad=False))
