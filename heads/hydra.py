"""Hydra's heads (Ankner et al. 2024, 2402.05109): Medusa's, with the tokens drafted so far.

Head i, from 0, at position t drafts token t + 2 + i of the target's last hidden state h and the
embeddings e:

    position      0            1            2            3     4
    token         a            b            c            d     e
    head 0 of     c:h0,b       d:h1,c       e:h2,d
    head 1 of     d:h0,b,c     e:h1,c,d

Hydra++ (section 4.2; `hydra_head_arch` "prefix-mlp") has a decoder layer of its own with a final
norm. It runs over all hidden states up to position t, and its output takes the place of h.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import Config
from treespec.heads.layers import KeyValues, Layer, RMSNorm, Rotary
from treespec.heads.levels import ARCHITECTURES
from treespec.heads.medusa import DepthHeads, ResBlock, last_linear


@final
class Prefix(nn.Module):
    """Hydra++'s view of the text: a Llama of one layer over the target's hidden states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(
        self,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """[B, T, H] hidden states at positions [T] or [B, T] -> [B, T, H].

        mask, cache: as for `EagleHead.step`.
        """
        layer = cast(Layer, self.layers[0])
        angles = self.rotary(positions, states.dtype)
        attend = partial(layer.self_attn, angles=angles, mask=mask, cache=cache)
        return self.norm(layer(states, attend))


@final
class HydraHead(DepthHeads):
    """K times `hydra_num_layers` residual blocks and an output layer, by their published names.

    config: as for `DepthHeads`, with `hydra_head_arch` "mlp" or "prefix-mlp" ("mlp" if absent), and
    Llama's fields for the prefix layer. The embeddings are the target's.
    Raises ValueError for other architectures, and for heads that see no tokens (`grounded_heads`
    false).
    """

    known_as: ClassVar[str] = "Hydra or Hydra++ heads"

    def __init__(self, config: Config) -> None:
        # 1. The kind, the number of heads, and their blocks.
        kind = kind_of(config)
        super().__init__(config, "hydra")
        if not config.get("grounded_heads", True):
            raise ValueError("grounded_heads is false: such heads see no tokens, and are Medusa's")
        self.kind: str = kind
        plus = kind == "hydra++"
        width = self.hidden_size

        # 2. The prefix layer and the blocks. Head i takes the state and the i + 1 tokens after it.
        self.prefix_embeding_layer = Prefix(LlamaConfig(**config)) if plus else None
        self.hydra_mlp = nn.ModuleList()
        for i in range(self.max_depth):
            blocks = [ResBlock(width, i + 2), *(ResBlock(width) for _ in range(self.blocks - 1))]
            self.hydra_mlp.append(in_line(blocks, gaps=plus))

        # 3. The output layers.
        outputs = [nn.Linear(width, self.vocab_size) for _ in range(self.max_depth)]
        self.hydra_lm_head = nn.ModuleList(
            in_line([output], gaps=True) if plus else output for output in outputs
        )

    @property
    def output_layers(self) -> list[nn.Linear]:
        return [last_linear(head) for head in self.hydra_lm_head]

    def states(
        self,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """[B, T, H] hidden states of the target -> the [B, T, H] states that the heads take.

        mask: [T, P + T] or [B, 1, T, P + T], what each attends to, None is causal.
        """
        if self.prefix_embeding_layer is None:
            return features
        return self.prefix_embeding_layer(features, positions, mask, cache)

    def hidden(self, i: int, states: Tensor) -> Tensor:
        """[..., (i + 2) H] state and the i + 1 embeddings after it -> [..., H] before the output."""
        hidden = self.hydra_mlp[i](states)
        for before in list(self.hydra_lm_head[i].children())[:-1]:
            hidden = before(hidden)
        return hidden

    def forward(self, features: Tensor, embeddings: Tensor, counts: Tensor) -> list[Tensor]:
        """For each head its states before the output layer, [M_i, H]; for training.

        features: [B, T, H] from position 0 on. embeddings: [B, T + K - 1, H] of the tokens after
        them. counts: [K, B, T] bool, which positions count for each head.
        """
        length = features.shape[1]
        states = self.states(features, torch.arange(length, device=features.device))
        hidden = []
        for i, kept in enumerate(counts):
            following = [embeddings[:, j : j + length][kept] for j in range(i + 1)]
            hidden.append(self.hidden(i, torch.cat([states[kept], *following], dim=-1)))
        return hidden


def in_line(modules: Sequence[nn.Module], gaps: bool) -> nn.Sequential:
    """gaps: number them as the published Hydra++ does, which has a dropout before each."""
    return nn.Sequential(
        *(part for module in modules for part in ((nn.Identity(), module) if gaps else (module,)))
    )


def kind_of(config: Config) -> str:
    """Hydra or Hydra++, by the architecture. Raises ValueError for others."""
    named = config.get("hydra_head_arch", "mlp")
    kinds = [kind for kind, architecture in ARCHITECTURES.items() if architecture == named]
    if not kinds:
        raise ValueError(
            f"hydra_head_arch is {named!r}, must be one of {', '.join(ARCHITECTURES.values())}"
        )
    return kinds[0]
