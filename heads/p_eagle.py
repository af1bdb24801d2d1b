"""P-EAGLE (Hui et al. 2026, 2602.01469): EAGLE-3's head that drafts all levels in one forward.

After the last pair the forward has rows whose feature and token are not known yet. Their inputs are a learnt
feature, `mask_hidden`, and the embedding of a mask token m. Each row sees the pairs and the rows before it.
Five tokens, four levels:

    position      0     1     2     3     4    5    6
    token         a     b     c     d     e
    head sees     g0,b  g1,c  g2,d  g3,e  m    m    m
    drafts level                    1     2    3    4      distributions of the tokens after e
"""

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import KeyValues
from treespec.heads.llama import BlockHead, Pairs


@final
class PEagleHead(Eagle3Head, BlockHead):
    """P-EAGLE's head. config: EAGLE-3's fields, `levels` and `mask_token_id`. Raises ValueError as `Eagle3Head`."""

    kind: str = "p-eagle"
    known_as: ClassVar[str] = "a P-EAGLE head"

    def __init__(self, config: Config) -> None:
        self.max_depth = int(config["levels"])
        if self.max_depth < 1:
            raise ValueError(f"it drafts {self.max_depth} levels, must be at least 1")
        super().__init__(config)
        self.block = self.max_depth - 1
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.feature_size))

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        defaults = {"model_type": cls.kind, "levels": 8, "mask_token_id": target.vocab_size - 1}
        return super().build_config(target, **defaults | fields)

    def build_step_inputs(
        self, tokens: Tensor, features: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """As `FeatureHead.build_step_inputs`, but from step 1 on the mask token and the learnt feature."""
        if not step:
            return tokens, features
        mask_features = self.fuse(self.mask_hidden.to(features.dtype))
        return torch.full_like(tokens, self.mask_token), mask_features.expand_as(features)

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """As `BlockHead.run`; the block has `max_depth` - 1 rows, because the last pair drafts level 1."""
        # 1. The rows of the block: the mask token and the learnt feature.
        n = pairs.tokens.shape[1]
        size = self.block
        if roots is None:
            size = 0
        tokens = pad(pairs.tokens, (0, size), value=self.mask_token)
        mask_features = self.mask_hidden.to(pairs.features.dtype).expand(len(tokens), size, -1)
        features = self.fuse(torch.cat([pairs.features, mask_features], dim=1))

        # 2. One step of EAGLE-3 over pairs and block; no row sees a later one.
        rows, columns = pairs.seen.shape[1:]
        visible = pairs.seen.tril(columns - rows)[:, None]
        states = self.forward_step(tokens, features, pairs.positions[:, -rows:], visible, caches)
        return states[:, :n], states[:, n:]

    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        """As `BlockHead.select_drafted_states`: the last pair's state is level 1."""
        return torch.cat([last[:, None], block], dim=1)
