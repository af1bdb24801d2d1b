"""Medusa's heads (Cai et al. 2024, 2401.10774, section 2.1): a head for each depth, all on one hidden state.

The hidden state h is the target's last one, after its final norm. The target's own output from h at
position t is token t + 1, so head i, from 0, drafts token t + 2 + i. Five tokens, each draft with its input:

    position      0     1     2     3     4
    token         a     b     c     d     e
    state         h0    h1    h2    .     .
    head 0        c:h0  d:h1  e:h2
    head 1        d:h0  e:h1

`DepthHeads` is the base class of Medusa's and Hydra's heads: residual blocks and an output layer for each depth.
"""

from abc import abstractmethod
from typing import Any, ClassVar, cast, final

import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.head import Config, Embed, Head, TargetFacts, TargetOutputPath


@final
class ResBlock(nn.Module):
    """Medusa's residual block: x + SiLU(W x + b). W is zero at first, so that the block passes x on.

    For several inputs side by side it is R x + r + SiLU(W x + b). R passes on the first input at first.
    """

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width)
        nn.init.zeros_(self.linear.weight)
        self.res_connection: nn.Module = nn.Identity()
        if inputs > 1:
            first = self.res_connection = nn.Linear(inputs * width, width)
            nn.init.eye_(first.weight)
            nn.init.zeros_(first.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs * H] -> [..., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class DepthHeads(Head):
    """K heads without an embedding: head i, from 0, drafts the token at depth i + 1.

    config: the content of config.json, with the fields `NAME_num_heads`, `NAME_num_layers` (1 if
    absent), `hidden_size` and `vocab_size`. Raises ValueError for less than one head or block.

    Attributes:
        name: NAME, "medusa" or "hydra".
        new_heads: the number of heads of a newly built one.
        new_blocks: the number of residual blocks in each of its heads.
        max_depth: K.
        blocks: the number of residual blocks in each head.
    """

    name: ClassVar[str]
    new_heads: ClassVar[int]
    new_blocks: ClassVar[int] = 1
    max_depth: int

    def __init__(self, config: Config) -> None:
        heads = f"{self.name}_num_heads"
        blocks = f"{self.name}_num_layers"
        super().__init__(config, int(config["vocab_size"]))
        self.max_depth = int(config[heads])
        self.blocks = int(config.get(blocks, 1))
        self.hidden_size = self.feature_size = int(config["hidden_size"])
        if min(self.max_depth, self.blocks) < 1:
            raise ValueError(f"{heads} and {blocks} must be at least 1")

    @classmethod
    def build_config(cls, target: TargetFacts, heads: int | None = None, **fields: Any) -> Config:
        if not heads:
            heads = cls.new_heads
        defaults = {
            "model_type": cls.name,
            f"{cls.name}_num_heads": heads,
            f"{cls.name}_num_layers": cls.new_blocks,
            "hidden_size": target.feature_width,
            "vocab_size": target.vocab_size,
        }
        return defaults | fields

    @abstractmethod
    def list_modules(self, i: int) -> list[nn.Module]:
        """List the modules of head i in order; the last one is its output layer."""

    @property
    def output_layers(self) -> list[nn.Linear]:
        return [cast(nn.Linear, self.list_modules(i)[-1]) for i in range(self.max_depth)]

    def compute_hidden(self, i: int, inputs: Tensor) -> Tensor:
        """Run the blocks of head i: its inputs [..., M H] -> the state [..., H] before its output layer."""
        for module in self.list_modules(i)[:-1]:
            inputs = module(inputs)
        return inputs

    def project(self, states: Tensor, step: int, target: TargetOutputPath | None = None) -> Tensor:
        """As `Head.project`, by the output layer of head `step`."""
        return self.output_layers[step](states)

    def compute_step_logits(self, i: int, inputs: Tensor) -> Tensor:
        """Run head i: its inputs [..., M H] -> logits [..., V]."""
        return self.project(self.compute_hidden(i, inputs), i)


@final
class MedusaHead(DepthHeads):
    """K heads of `medusa_num_layers` residual blocks and an output layer, with the published parameter names.

    config: `DepthHeads`' fields.
    """

    kind: str = "medusa"
    known_as: ClassVar[str] = "Medusa heads"
    name = "medusa"
    new_heads = 5

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for i in range(self.max_depth):
            line = nn.Sequential()
            for _ in range(self.blocks):
                line.append(ResBlock(self.hidden_size))
            line.append(nn.Linear(self.hidden_size, self.vocab_size, bias=False))
            self.add_module(str(i), line)

    def list_modules(self, i: int) -> list[nn.Module]:
        return list(self.get_submodule(str(i)).children())

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed | None = None,
    ) -> list[Tensor]:
        """As `Head.forward`; step i is head i. It reads features, and no tokens."""
        rows = features.shape[1]
        states = []
        for i in range(min(steps, self.max_depth)):
            inputs = features[:, : max(0, rows - i)][counts[:, i:]]
            states.append(self.compute_hidden(i, inputs))
        return states
