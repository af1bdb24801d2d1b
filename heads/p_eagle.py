"""P-EAGLE (Hui et al. 2026, 2602.01469): EAGLE-3's head, which drafts all levels in one forward.

Below the last pair stand rows that have no feature and no token yet: each takes a learnt feature,
`mask_hidden`, and the embedding of a mask token. A row sees the pairs and the rows before it. Five
tokens, four levels:

    position      0     1     2     3     4    5    6
    token         a     b     c     d     e
    head sees     g0,b  g1,c  g2,d  g3,e  m    m    m
    head gives                      1     2    3    4      the laws of the tokens after e
"""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from treespec.heads.block import BlockHead, Pairs, check_mask_token
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import EMBEDDING, Config, Embed, OutputPath, Tensors
from treespec.heads.layers import KeyValues

INNER = "eagle3."  # before the names of EAGLE-3's own tensors


@final
class PEagleHead(BlockHead):
    """config: EAGLE-3's fields, `levels` and `mask_token_id`. Raises ValueError as `Eagle3Head`."""

    kind: str = "p-eagle"
    known_as: ClassVar[str] = "a P-EAGLE head"
    optional: ClassVar[frozenset[str]] = frozenset({INNER + EMBEDDING})

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.max_depth = config, int(config["levels"])
        inner = {name: value for name, value in config.items() if name != "model_type"}
        self.eagle3 = Eagle3Head(inner)
        self.vocab_size, self.block = self.eagle3.vocab_size, self.max_depth - 1
        self.taps, self.hidden_size = self.eagle3.taps, self.eagle3.hidden_size
        self.feature_size = self.eagle3.feature_size
        self.layer_count, self.mask_token = len(self.eagle3.attentions), config["mask_token_id"]
        if self.max_depth < 1:
            raise ValueError(f"it drafts {self.max_depth} levels, must be at least 1")
        check_mask_token(self.mask_token, self.vocab_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.feature_size))

    @property
    def vocabulary(self) -> Tensor | None:
        return self.eagle3.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return self.eagle3.dtype

    @property
    def lacks_embedding(self) -> bool:
        return self.eagle3.lacks_embedding

    def settle_taps(self, layers: int) -> None:
        self.eagle3.settle_taps(layers)
        self.taps = self.eagle3.taps

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        self.eagle3.share_embedding(weight)

    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        self.eagle3.restrict(tokens, target)
        self.config = self.config | {"draft_vocab_size": self.eagle3.config["draft_vocab_size"]}

    def fill(self, tensors: Tensors) -> None:
        tensors = dict(tensors)
        self.mask_hidden = nn.Parameter(tensors.pop("mask_hidden"))
        self.eagle3.fill({name.removeprefix(INNER): value for name, value in tensors.items()})

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor | None, Tensor]:
        tokens, features, places, seen = pairs
        # 1. The rows of the block: the mask token and the learnt feature; no row sees a later one.
        b, n = tokens.shape
        size = 0 if roots is None else self.block
        masks = tokens.new_full((b, size), self.mask_token)
        learnt = self.mask_hidden.to(features.dtype).expand(b, size, -1)
        rows = n + size
        later = torch.ones(rows, rows, dtype=torch.bool, device=seen.device).triu(1)
        seen = seen.clone()
        seen[..., -rows:] &= ~later

        # 2. One step of EAGLE-3 over pairs and block.
        fused = self.eagle3.fuse(torch.cat([features, learnt], dim=1))
        states = self.eagle3.step(
            torch.cat([tokens, masks], dim=1), fused, places[:, -rows:], seen[:, None], caches
        )
        return states[:, :n], states[:, n:]

    def drafted(self, last: Tensor | None, block: Tensor) -> Tensor:
        assert last is not None
        return torch.cat([last[:, None], block], dim=1)

    def logits(self, states: Tensor, target: OutputPath) -> Tensor:
        return self.eagle3.logits(states)
