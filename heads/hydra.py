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

from functools import partial
from itertools import chain
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import Config, TargetFacts
from treespec.heads.layers import KeyValues, Layer, RMSNorm, Rotary
from treespec.heads.llama import LlamaHead
from treespec.heads.medusa import DepthHeads, ResBlock, last_linear


@final
class Prefix(nn.Module):
    """Hydra++'s view of the sequence: a Llama of one layer over the target's hidden states."""

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

        mask: [T, P + T] or [B, 1, T, P + T], what each attends to, None is causal.
        """
        layer = cast(Layer, self.layers[0])
        angles = self.rotary(positions, states.dtype)
        attend = partial(layer.self_attn, angles=angles, mask=mask, cache=cache)
        return self.norm(layer(states, attend))


class HydraHead(DepthHeads):
    """K times `hydra_num_layers` residual blocks and an output layer, by their published names.

    config: as for `DepthHeads`, with `hydra_head_arch` ("mlp" if absent). The embeddings are the
    target's. gaps: whether modules are numbered as in the published Hydra++, which has a dropout
    before each. new_blocks: blocks of a new head.
    cached_layers: layers with keys and values.
    Raises ValueError for other architectures, and for heads that see no tokens (`grounded_heads`
    false).
    """

    kind: str = "hydra"
    known_as: ClassVar[str] = "Hydra or Hydra++ heads"
    name = "hydra"
    new_heads = 4
    architecture: ClassVar[str] = "mlp"
    gaps: ClassVar[bool] = False
    new_blocks: ClassVar[int] = 1
    cached_layers: ClassVar[int] = 0

    def __init__(self, config: Config) -> None:
        # 1. The architecture, the number of heads, and their blocks.
        super().__init__(config)
        if (named := config.get("hydra_head_arch", "mlp")) != self.architecture:
            raise ValueError(f"hydra_head_arch is {named!r}, must be one of mlp, prefix-mlp")
        if not config.get("grounded_heads", True):
            raise ValueError("grounded_heads is false: such heads see no tokens, and are Medusa's")

        # 2. Head i takes the state and the i + 1 tokens after it.
        width, plus = self.hidden_size, self.cached_layers
        self.prefix_embeding_layer = Prefix(LlamaConfig(**config)) if plus else None
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for i in range(self.max_depth):
            blocks = [ResBlock(width, i + 2), *(ResBlock(width) for _ in range(self.blocks - 1))]
            self.hydra_mlp.append(self._in_line(*blocks))
        for _ in range(self.max_depth):
            output = nn.Linear(width, self.vocab_size)
            self.hydra_lm_head.append(self._in_line(output) if self.gaps else output)

    def _in_line(self, *modules: nn.Module) -> nn.Sequential:
        parts = ([nn.Identity(), module] if self.gaps else [module] for module in modules)
        return nn.Sequential(*chain.from_iterable(parts))

    @classmethod
    def config_for(cls, target: TargetFacts, heads: int | None = None, **fields: Any) -> Config:
        own = {"hydra_num_layers": cls.new_blocks, "hydra_head_arch": cls.architecture}
        return super().config_for(target, heads, **own | {"grounded_heads": True} | fields)

    @property
    def output_layers(self) -> list[nn.Linear]:
        return [last_linear(head) for head in self.hydra_lm_head]

    def states(self, features: Tensor, positions: Tensor, *view: Any) -> Tensor:
        """[B, T, H] hidden states of the target -> the [B, T, H] states that the heads take.

        positions: [T] or [B, T]. view: mask and cache, as `Prefix` takes them.
        """
        if self.prefix_embeding_layer is None:
            return features
        return self.prefix_embeding_layer(features, positions, *view)

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


@final
class HydraPlusHead(HydraHead):
    """With a prefix layer. config: as for `HydraHead`, and Llama's fields for the layer."""

    kind: str = "hydra++"
    architecture = "prefix-mlp"
    gaps = True
    new_blocks = 4
    cached_layers = 1

    @classmethod
    def config_for(cls, target: TargetFacts, heads: int | None = None, **fields: Any) -> Config:
        return LlamaHead.config_for(target, **super().config_for(target, heads, **fields))
