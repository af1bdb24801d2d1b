"""P-EAGLE (Hui et al. 2026, 2602.01469): EAGLE-3's head, which drafts all levels in one forward.

After the last pair stand rows that have no feature and no token yet: each takes a learnt feature,
`mask_hidden`, and the embedding of a mask token. A row sees the pairs and the rows before it. Five
tokens, four levels:

    position      0     1     2     3     4    5    6
    token         a     b     c     d     e
    head sees     g0,b  g1,c  g2,d  g3,e  m    m    m
    head gives                      1     2    3    4      distributions of the tokens after e
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
    """config: EAGLE-3's fields, `levels` and `mask_token_id`. Raises ValueError as `Eagle3Head`."""

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
        own = {"model_type": cls.kind, "levels": 8, "mask_token_id": target.vocab_size - 1}
        return super().build_config(target, **own | fields)

    def build_step_inputs(
        self, tokens: Tensor, features: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """From step 1 on the mask token and the learnt feature."""
        if not step:
            return tokens, features
        learnt = self.fuse(self.mask_hidden.to(features.dtype))
        return torch.full_like(tokens, self.mask_token), learnt.expand_as(features)

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        # 1. The rows of the block: the mask token and the learnt feature.
        n = pairs.tokens.shape[1]
        size = self.block
        if roots is None:
            size = 0
        tokens = pad(pairs.tokens, (0, size), value=self.mask_token)
        learnt = self.mask_hidden.to(pairs.features.dtype).expand(len(tokens), size, -1)
        features = self.fuse(torch.cat([pairs.features, learnt], dim=1))

        # 2. One step of EAGLE-3 over pairs and block; no row sees a later one.
        rows, columns = pairs.seen.shape[1:]
        seen = pairs.seen.tril(columns - rows)[:, None]
        states = self.forward_step(tokens, features, pairs.positions[:, -rows:], seen, caches)
        return states[:, :n], states[:, n:]

    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        return torch.cat([last[:, None], block], dim=1)
