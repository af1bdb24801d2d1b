"""DFlash (Chen et al. 2026, 2602.06036): a block of mask tokens, filled in by one forward.

The target's features at aux layers, fused by `fc`, become keys and values of every layer of the
head; they have no rows of their own. The block is the sequence's last token and mask tokens after it,
which all see each other. Five tokens, a block of four:

    position      0    1    2    3    4    5    6    7
    token         a    b    c    d    e    m    m    m
    keys from     g0   g1   g2   g3   the block's own rows
    head gives                             1    2    3       distributions of the tokens after e

With `sample_from_anchor` each row drafts the token after its own position, so the block of four
drafts four levels.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.eagle3 import default_aux_layers
from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import KeyValues, Layer, RMSNorm, windows_of
from treespec.heads.llama import BlockHead, Pairs


@final
class DFlashHead(BlockHead):
    """Parameter names are the published checkpoint's.

    config: Llama's fields for Qwen3's layers, and
    - `aux_hidden_state_layer_ids`, `mask_token_id`, `block_size`.
    - `sample_from_anchor` (false if absent): whether the last token's row drafts too.
    - `layer_types` and `sliding_window`, as for `Eagle3Head`. `causal`: for each layer, whether a
      block row sees no later one; if absent, the layers with a window.
    - `own_output`: whether it has an output layer of its own, of `draft_vocab_size` tokens, with
      d2t and t2d as in EAGLE-3; otherwise the target's output path serves.

    embed_tokens: None where the checkpoint has none; then the target's embedding serves.
    """

    kind: str = "dflash"
    known_as: ClassVar[str] = "a DFlash head"

    def __init__(self, config: Config) -> None:
        # 1. What the config says.
        super().__init__(config)
        width, eps = self.hidden_size, self.llama.rms_norm_eps
        self.aux_layers = tuple(int(k) for k in config["aux_hidden_state_layer_ids"])
        self.block, self.from_anchor = int(config["block_size"]), config.get("sample_from_anchor")
        self.max_depth = self.block if self.from_anchor else self.block - 1
        if self.max_depth < 1:
            raise ValueError(f"block_size is {self.block}, must be at least 2")
        self.check_mask_token()
        self.windows = windows_of(config)
        self.causal = config.get("causal") or [window is not None for window in self.windows]
        self.layer_count = len(self.windows)

        # 2. The modules, by their published names.
        self.feature_size = len(self.aux_layers) * (config.get("target_hidden_size") or width)
        self.fc = nn.Linear(self.feature_size, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(Layer(self.llama, qk_norm=True) for _ in self.windows)
        if config.get("own_output"):
            self.draft_first(config.get("draft_vocab_size"))

    @classmethod
    def config_for(cls, target: TargetFacts, **fields: Any) -> Config:
        own = {
            "model_type": cls.kind,
            "aux_hidden_state_layer_ids": list(default_aux_layers(target.layers)),
            "block_size": 8,
            "mask_token_id": target.vocab_size - 1,
            "target_hidden_size": target.config.hidden_size,
        }
        return super().config_for(target, **own | fields)

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor | None, Tensor]:
        tokens, features, places, seen = pairs
        # 1. The features as every layer takes them, and the rows of the block.
        n, size = tokens.shape[1], 0 if roots is None else self.block
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(places[:, -n - size :], context.dtype)
        before, within = (cos[:, :, :n], sin[:, :, :n]), (cos[:, :, n:], sin[:, :, n:])
        x = context[:, :0]
        if roots is not None:
            masks = tokens.new_full((len(tokens), size - 1), self.mask_token)
            block = torch.cat([roots[:, None], masks], dim=1)
            x = (self.embed_tokens or embed)(block).to(context.dtype)

        # 2. The layers. Without a block they take the keys and values of the features alone.
        for number, (module, cache) in enumerate(zip(self.layers, caches, strict=True)):
            layer = cast(Layer, module)
            attention = layer.self_attn
            known = attention.keys_values(context, before)
            if roots is None:
                cache.update(*known)
                continue
            normed = layer.input_layernorm(x)
            q, *own = attention.project(normed, within)
            columns = cache.update(
                *(torch.cat(pair, dim=2) for pair in zip(known, own, strict=True))
            )
            mask = self._mask(number, places, seen[:, n:])[:, None]
            x = x + attention.joined(
                F.scaled_dot_product_attention(
                    q, *columns, attn_mask=mask, enable_gqa=attention.grouped
                )
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return None, self.norm(x)

    def _mask(self, number: int, places: Tensor, seen: Tensor) -> Tensor:
        """[B, S, T] the columns that the block's rows see in a layer: causality and its window."""
        window, size = self.windows[number], seen.shape[1]
        if self.causal[number]:
            own = torch.ones(size, size, dtype=torch.bool, device=seen.device).tril()
            seen = torch.cat([seen[..., :-size], seen[..., -size:] & own], dim=-1)
        if window is not None:
            seen = seen & (places[:, None] > places[:, -size:, None] - window)
        return seen

    def drafted(self, last: Tensor | None, block: Tensor) -> Tensor:
        return block if self.from_anchor else block[:, 1:]
