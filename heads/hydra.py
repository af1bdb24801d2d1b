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

from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import KeyValues, Layer, RMSNorm, Rotary
from treespec.heads.llama import LlamaHead
from treespec.heads.medusa import DepthHeads, ResBlock


class HydraHead(DepthHeads):
    """K times `hydra_num_layers` residual blocks and an output layer, by their published names.

    config: as for `DepthHeads`, with `hydra_head_arch` ("mlp" if absent). The embeddings are the
    target's. plus: whether it is Hydra++, whose published modules have a dropout before each.
    Raises ValueError for other architectures.
    """

    kind: str = "hydra"
    known_as: ClassVar[str] = "Hydra or Hydra++ heads"
    name = "hydra"
    new_heads = 4
    architecture: ClassVar[str] = "mlp"
    plus: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        # 1. The architecture, the number of heads, and their blocks.
        super().__init__(config)
        named = config.get("hydra_head_arch", "mlp")
        if named != self.architecture:
            raise ValueError(f"hydra_head_arch is {named!r}, must be one of mlp, prefix-mlp")

        # 2. Hydra++'s view of the sequence: a Llama of one layer over the target's hidden states.
        width = self.hidden_size
        self.cached_layers = int(self.plus)
        if self.plus:
            llama = LlamaConfig(**config)
            self.rotary = Rotary(llama)
            norm = RMSNorm(width, eps=llama.rms_norm_eps)
            parts = {"layers": nn.ModuleList([Layer(llama)]), "norm": norm}
            self.prefix_embeding_layer = nn.ModuleDict(parts)

        # 3. Head i takes the state and the i + 1 tokens after it.
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for i in range(self.max_depth):
            blocks = [ResBlock(width, i + 2), *(ResBlock(width) for _ in range(self.blocks - 1))]
            self.hydra_mlp.append(self._in_line(*blocks))
        for _ in range(self.max_depth):
            output = nn.Linear(width, self.vocab_size)
            self.hydra_lm_head.append(self._in_line(output) if self.plus else output)

    def _in_line(self, *modules: nn.Module) -> nn.Sequential:
        parts = ([nn.Identity(), module] if self.plus else [module] for module in modules)
        return nn.Sequential(*chain.from_iterable(parts))

    def line(self, i: int) -> list[nn.Module]:
        output = self.hydra_lm_head[i]
        return [*self.hydra_mlp[i].children(), *(output.children() if self.plus else [output])]

    @classmethod
    def config_for(cls, target: TargetFacts, heads: int | None = None, **fields: Any) -> Config:
        own = {"hydra_head_arch": cls.architecture, "grounded_heads": True} | fields
        config = super().config_for(target, heads, **own)
        return LlamaHead.config_for(target, **config) if cls.plus else config

    def states(
        self,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """[B, T, H] hidden states of the target -> the [B, T, H] states that the heads take.

        positions: [T] or [B, T]. mask: [T, P + T] or [B, 1, T, P + T], what each position of Hydra++
        attends to, None is causal. cache: of its layer.
        """
        if not self.plus:
            return features
        layer = cast(Layer, self.prefix_embeding_layer["layers"].get_submodule("0"))
        angles = self.rotary(positions, features.dtype)
        attend = partial(layer.self_attn, angles=angles, mask=mask, cache=cache)
        return self.prefix_embeding_layer["norm"](layer(features, attend))

    def forward(
        self, tokens: Tensor, features: Tensor, counts: Tensor, steps: int, embed: Embed
    ) -> list[Tensor]:
        """As `Head.forward`; a step is a head, which sees the text's tokens."""
        rows = features.shape[1]
        embedded = embed(tokens[:, 1 : rows + 1]).to(features.dtype)
        inputs = self.states(features, torch.arange(rows, device=features.device))
        hidden = []
        for i in range(min(steps, self.max_depth)):
            inputs = torch.cat([inputs[:, : max(0, rows - i)], embedded[:, i:]], dim=-1)
            hidden.append(self.hidden(i, inputs[counts[:, i:]]))
        return hidden


@final
class HydraPlusHead(HydraHead):
    """With a prefix layer. config: as for `HydraHead`, and Llama's fields for the layer."""

    kind: str = "hydra++"
    architecture = "prefix-mlp"
    plus = True
    new_blocks = 4
