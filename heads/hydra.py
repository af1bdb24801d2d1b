"""Hydra's heads (Ankner et al. 2024, 2402.05109): Medusa's heads that also read the tokens drafted so far.

Head i, from 0, at position t drafts token t + 2 + i. It reads the target's last hidden state h at t and
the embeddings of the tokens t + 1 to t + 1 + i. Five tokens, each draft with its inputs:

    position      0            1            2            3     4
    token         a            b            c            d     e
    head 0        c:h0,b       d:h1,c       e:h2,d
    head 1        d:h0,b,c     e:h1,c,d

Hydra++ (section 4.2; `hydra_head_arch` "prefix-mlp") has a decoder layer with a final norm before the
heads. The layer runs over the hidden states up to position t, and the heads read its output instead of h.
"""

from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import KeyValues, Layer, RMSNorm, Rotary
from treespec.heads.llama import LlamaHead
from treespec.heads.medusa import DepthHeads, ResBlock


class HydraHead(DepthHeads):
    """K heads of `hydra_num_layers` residual blocks and an output layer, with the published parameter names.

    The embeddings are the target's. config: `DepthHeads`' fields, and `hydra_head_arch` ("mlp" if absent).
    Raises ValueError for other architectures.

    Attributes:
        architecture: the value of `hydra_head_arch`.
        plus: whether it is Hydra++, whose published modules have a dropout before each.
    """

    kind: str = "hydra"
    known_as: ClassVar[str] = "Hydra or Hydra++ heads"
    name = "hydra"
    new_heads = 4
    architecture: ClassVar[str] = "mlp"
    plus: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        # 1. Check the architecture.
        super().__init__(config)
        architecture = config.get("hydra_head_arch", "mlp")
        if architecture != self.architecture:
            raise ValueError(f"hydra_head_arch is {architecture!r}, must be one of mlp, prefix-mlp")

        # 2. Hydra++'s prefix layer: a Llama of one layer over the target's hidden states.
        width = self.hidden_size
        self.cached_layers = int(self.plus)
        if self.plus:
            llama = LlamaConfig(**config)
            self.rotary = Rotary(llama)
            norm = RMSNorm(width, eps=llama.rms_norm_eps)
            layers = nn.ModuleList([Layer(llama)])
            self.prefix_embeding_layer = nn.ModuleDict({"layers": layers, "norm": norm})

        # 3. The heads: head i reads the state and the i + 1 tokens after it.
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(self.max_depth):
            blocks: list[nn.Module] = [ResBlock(width, i + 2)]
            for _ in range(self.blocks - 1):
                blocks.append(ResBlock(width))
            self.hydra_mlp.append(self._join_line(blocks))
        for _ in range(self.max_depth):
            output: nn.Module = nn.Linear(width, self.vocab_size)
            if self.plus:
                output = self._join_line([output])
            self.hydra_lm_head.append(output)

    def _join_line(self, modules: list[nn.Module]) -> nn.Sequential:
        """Chain modules. Hydra++ has an identity before each, which training replaces by a dropout."""
        line = nn.Sequential()
        for module in modules:
            if self.plus:
                line.append(nn.Identity())
            line.append(module)
        return line

    def list_modules(self, i: int) -> list[nn.Module]:
        modules = list(self.hydra_mlp[i].children())
        output = self.hydra_lm_head[i]
        if self.plus:
            return modules + list(output.children())
        return modules + [output]

    @classmethod
    def build_config(cls, target: TargetFacts, heads: int | None = None, **fields: Any) -> Config:
        head_fields = {"hydra_head_arch": cls.architecture, "grounded_heads": True} | fields
        config = super().build_config(target, heads, **head_fields)
        if cls.plus:
            return LlamaHead.build_config(target, **config)
        return config

    def prepare_states(
        self,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """Turn the target's hidden states into the states that the heads read: Hydra++'s by the prefix layer.

        Args:
            features: [B, T, H] the target's.
            positions: [T] or [B, T] positions of the features.
            mask: [T, P + T] or [B, 1, T, P + T] bool, the columns that each row of Hydra++'s prefix layer
                sees; None is causal.
            cache: keys and values of that layer at P earlier positions.

        Returns:
            [B, T, H]; Hydra's are the features themselves.
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
        """As `Head.forward`; step i is head i. It reads the sequence's tokens, not drafted ones."""
        rows = features.shape[1]
        embedded = embed(tokens[:, 1 : rows + 1]).to(features.dtype)
        inputs = self.prepare_states(features, torch.arange(rows, device=features.device))
        hidden = []
        for i in range(min(steps, self.max_depth)):
            inputs = torch.cat([inputs[:, : max(0, rows - i)], embedded[:, i:]], dim=-1)
            hidden.append(self.compute_hidden(i, inputs[counts[:, i:]]))
        return hidden


@final
class HydraPlusHead(HydraHead):
    """Hydra++: Hydra with a prefix layer. config: `HydraHead`'s fields, and Llama's fields for the layer."""

    kind: str = "hydra++"
    architecture = "prefix-mlp"
    plus = True
    new_blocks = 4
