"""Domino (SpecForge): DFlash with a bias on each level, by a GRU over all tokens drafted above.

s_t = GRU(embedding of the token t, s_(t-1))        s: the memory, zeros above the root
z   = SiLU(P [h, s])                                h: the level's state of the block
the level's draft logits + Q z                      not for the first `pure_draft_prefix_len` levels
"""

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.conditional import ConditionalBlockHead, read_count
from treespec.heads.head import Config, Embed, TargetFacts, TargetOutputPath


@final
class DominoHead(ConditionalBlockHead):
    """Domino's head, with the published parameter names.

    config: DFlash's fields, where `sample_from_anchor` is what the project calls `shift_label`, and
    - `gru_hidden_dim`, the width of s; `emb_dim`, the width of z.
    - `pure_draft_prefix_len` (0 if absent): the number of first levels without a bias.
    """

    kind: str = "domino"
    known_as: ClassVar[str] = "a Domino head"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.hidden_size
        self.memory_size = read_count(config, "gru_hidden_dim")
        self.latent_size = read_count(config, "emb_dim")
        self.plain_levels = 0
        if config.get("pure_draft_prefix_len"):
            self.plain_levels = read_count(config, "pure_draft_prefix_len")
        drafted = self.vocab_size
        if self.lm_head is not None:
            drafted = self.lm_head.out_features
        self.prefix_gru = nn.GRU(width, self.memory_size, bias=False, batch_first=True)
        bias_layer = nn.Linear(self.latent_size, drafted, bias=False)
        nn.init.zeros_(bias_layer.weight)  # a new head drafts as DFlash
        self.embed_proj = nn.Sequential(
            nn.Linear(width + self.memory_size, self.latent_size, bias=False),
            nn.SiLU(),
            bias_layer,
        )

    @classmethod
    def build_config(cls, target: TargetFacts, levels: int = 7, **fields: Any) -> Config:
        defaults = {"block_size": levels, "sample_from_anchor": True}
        sizes = {"gru_hidden_dim": 1024, "emb_dim": 256, "pure_draft_prefix_len": 1}
        return super().build_config(target, levels, **defaults | sizes | fields)

    @property
    def drafted_rows(self) -> list[nn.Module]:
        return [self.embed_proj[2]]

    def read_parents(
        self, hidden: Tensor, tokens: Tensor, memory: Tensor, level: int, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embed_block(tokens, embed).to(hidden.dtype)
        steps = embedded.reshape(-1, 1, embedded.shape[-1])
        start = memory.reshape(1, -1, self.memory_size).contiguous()
        memory = self.prefix_gru(steps, start)[0].view(*tokens.shape, self.memory_size)
        if level < self.plain_levels:
            return hidden.new_zeros(*tokens.shape, self.latent_size), memory
        return F.silu(self.embed_proj[0](torch.cat([hidden, memory], dim=-1))), memory

    def adjust_logits(
        self, logits: Tensor, latent: Tensor, target: TargetOutputPath | None
    ) -> Tensor:
        return logits + self.embed_proj[2](latent)
