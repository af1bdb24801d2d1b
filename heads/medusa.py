"""Medusa's heads (Cai et al. 2024, 2401.10774, section 2.1): one for each token ahead, all of the same hidden state.

The hidden state is the target's last after its final norm. Head i, from 0, at position t drafts token t + 2 + i, as
the target itself says token t + 1. Five tokens:

    position      0     1     2     3     4
    token         a     b     c     d     e
    state         h0    h1    h2    .     .
    head 0 of     c:h0  d:h1  e:h2
    head 1 of     d:h0  e:h1
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.heads.residual import ResBlock, keep_rows


@final
class MedusaHead(nn.Module):
    """K times `medusa_num_layers` residual blocks and an output layer. Parameter names are the published checkpoint's.

    config: the content of config.json: `medusa_num_heads`, `medusa_num_layers` (1 if absent), `hidden_size`,
    `vocab_size`. vocabulary: [N] int64 ascending, the target's tokens that it drafts; None is all.
    Raises ValueError for a config without heads or blocks.
    """

    kind, known_as = "medusa", "Medusa heads"
    taps: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        try:
            self.max_depth, layers = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))
            self.hidden_size, self.vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        if min(self.max_depth, layers) < 1:
            raise ValueError("medusa_num_heads and medusa_num_layers must be at least 1")
        self.config = config
        for i in range(self.max_depth):
            blocks = [ResBlock(self.hidden_size) for _ in range(layers)]
            self.add_module(str(i), nn.Sequential(*blocks, nn.Linear(self.hidden_size, self.vocab_size, bias=False)))
        self.vocabulary: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the states that it takes."""
        return next(self.parameters()).dtype

    @property
    def output_layers(self) -> list[nn.Linear]:
        """The last layer of each head."""
        heads: list[Any] = [self.get_submodule(str(i)) for i in range(self.max_depth)]
        return [head[-1] for head in heads]

    def restrict(self, tokens: Tensor, target: Any = None) -> None:
        """Draft these of the target's tokens alone, [N] int64 ascending."""
        self.vocabulary = tokens
        for layer in self.output_layers:
            keep_rows(layer, tokens)

    @property
    def feature_size(self) -> int:
        return self.hidden_size

    def step(self, i: int, states: Tensor) -> Tensor:
        """[..., H] hidden states -> [..., V] logits of head i."""
        return self.get_submodule(str(i))(states)

    def forward(self, states: Tensor) -> list[Tensor]:
        """[..., H] hidden states -> [..., V] logits of each head."""
        return [self.step(i, states) for i in range(self.max_depth)]
