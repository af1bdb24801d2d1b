"""Medusa's heads (Cai et al. 2024, 2401.10774, section 2.1): one head a depth, one hidden state.

The hidden state is the target's last one, after its final norm. The target's own output from it at
position t is token t + 1, so head i, from 0, drafts token t + 2 + i. Five tokens:

    position      0     1     2     3     4
    token         a     b     c     d     e
    state         h0    h1    h2    .     .
    head 0 of     c:h0  d:h1  e:h2
    head 1 of     d:h0  e:h1
"""

from typing import ClassVar, final

from torch import Tensor, nn

from treespec.heads.depths import DepthHeads, ResBlock, last_linear
from treespec.heads.head import Config


@final
class MedusaHead(DepthHeads):
    """K times `medusa_num_layers` residual blocks and an output layer, by their published names.

    config: as for `DepthHeads`.
    """

    kind: str = "medusa"
    known_as: ClassVar[str] = "Medusa heads"

    def __init__(self, config: Config) -> None:
        super().__init__(config, "medusa")
        for i in range(self.max_depth):
            blocks = [ResBlock(self.hidden_size) for _ in range(self.blocks)]
            output = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
            self.add_module(str(i), nn.Sequential(*blocks, output))

    @property
    def output_layers(self) -> list[nn.Linear]:
        """The heads' last layers, H -> V."""
        return [last_linear(self.get_submodule(str(i))) for i in range(self.max_depth)]

    def step(self, i: int, states: Tensor) -> Tensor:
        """[..., H] hidden states -> [..., V] logits of head i."""
        return self.get_submodule(str(i))(states)

    def hidden(self, i: int, states: Tensor) -> Tensor:
        """[..., H] hidden states of the target -> [..., H] those of head i before its output."""
        *blocks, _ = self.get_submodule(str(i)).children()
        for block in blocks:
            states = block(states)
        return states

    def forward(self, features: Tensor, counts: Tensor) -> list[Tensor]:
        """For each head its states before the output layer, [M_i, H]; for training.

        features: [B, T, H] the target's. counts: [K, B, T] bool, which of them count for each head.
        """
        return [self.hidden(i, features[kept]) for i, kept in enumerate(counts)]
