"""DFlash (Chen et al. 2026, 2602.06036): a block of mask tokens, filled in by one forward.

The target's features at tapped layers, fused by `fc`, become keys and values of every layer of the
head; they have no rows of their own. The block is the text's last token and mask tokens behind it,
which all see each other. Five tokens, a block of four:

    position      0    1    2    3    4    5    6    7
    token         a    b    c    d    e    m    m    m
    keys from     g0   g1   g2   g3   the block's own rows
    head gives                             1    2    3       the laws of the tokens after e

With `sample_from_anchor` each row drafts the token after its own place, so the block of four
drafts four levels.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.block import BlockHead, Pairs, check_mask_token
from treespec.heads.head import EMBEDDING, Config, Embed, MappedHead, OutputPath
from treespec.heads.layers import Attention, KeyValues, Layer, RMSNorm, Rotary, windows_of


@final
class DFlashHead(MappedHead, BlockHead):
    """Parameter names are the published checkpoint's.

    config: Llama's fields for Qwen3's layers, and
    - `taps`, `mask_token_id`, `block_size`.
    - `sample_from_anchor` (false if absent): whether the last token's row drafts too.
    - `layer_types` and `sliding_window`, as for `Eagle3Head`. `causal`: for each layer, whether a
      block row sees no later one; if absent, the layers with a window.
    - `own_output`: whether it has an output layer of its own, of `draft_vocab_size` tokens, with
      d2t and t2d as in EAGLE-3; otherwise the target's output path serves.

    embed_tokens: None where the checkpoint has none; then the target's embedding serves.
    """

    kind: str = "dflash"
    known_as: ClassVar[str] = "a DFlash head"
    optional: ClassVar[frozenset[str]] = frozenset({EMBEDDING})

    def __init__(self, config: Config) -> None:
        # 1. What the config says.
        super().__init__()
        llama = LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
        width, eps = llama.hidden_size, llama.rms_norm_eps
        self.config, self.vocab_size = config, llama.vocab_size
        self.taps = tuple(int(k) for k in config["taps"])
        self.block, self.mask_token = int(config["block_size"]), config["mask_token_id"]
        self.from_anchor = bool(config.get("sample_from_anchor"))
        self.max_depth = self.block if self.from_anchor else self.block - 1
        if self.max_depth < 1:
            raise ValueError(f"block_size is {self.block}, must be at least 2")
        check_mask_token(self.mask_token, self.vocab_size)
        self.windows = windows_of(config)
        self.causal = config.get("causal") or [window is not None for window in self.windows]
        self.layer_count = len(self.windows)

        # 2. The modules, by their published names.
        self.hidden_size = width
        self.feature_size = len(self.taps) * (config.get("target_hidden_size") or width)
        self.fc = nn.Linear(self.feature_size, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        layers = [Layer(llama, qk_norm=True) for _ in self.windows]
        self.layers, self.rotary = nn.ModuleList(layers), Rotary(llama)
        embedding = nn.Embedding(self.vocab_size, width).requires_grad_(False)
        self.embed_tokens: nn.Embedding | None = embedding
        self.lm_head: nn.Linear | None = None
        self.output: nn.Module | None = None
        drafted = config.get("draft_vocab_size") or self.vocab_size
        if config.get("own_output"):
            self.lm_head = nn.Linear(width, drafted, bias=False)
        self.draft(None if drafted == self.vocab_size else torch.arange(drafted))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        own = self.embed_tokens  # None: `run` is given the target's, which a target may scale
        if own is None or isinstance(weight, nn.Module):
            return
        if own.weight.device == weight.device and torch.equal(own.weight, weight):
            own.weight = weight

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
            known = layer.self_attn.keys_values(context, before)
            if roots is None:
                cache.update(*known)
                continue
            mask = self._mask(number, places, seen[:, n:])
            x = layer(x, partial(attend, layer.self_attn, within, known, cache, mask))
        return None, self.norm(x)

    def _mask(self, number: int, places: Tensor, seen: Tensor) -> Tensor:
        """[B, S, T] the columns that the block's rows see in a layer: causality and its window."""
        window, size = self.windows[number], seen.shape[1]
        if self.causal[number]:
            later = torch.ones(size, size, dtype=torch.bool, device=seen.device).triu(1)
            seen = seen.clone()
            seen[..., -size:] &= ~later
        if window is not None:
            seen = seen & (places[:, None] > places[:, -size:, None] - window)
        return seen

    def drafted(self, last: Tensor | None, block: Tensor) -> Tensor:
        return block if self.from_anchor else block[:, 1:]

    def logits(self, states: Tensor, target: OutputPath) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(states)
        return target.output_logits(states, self.output)


def attend(
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    known: tuple[Tensor, Tensor],
    cache: KeyValues,
    mask: Tensor,
    x: Tensor,
) -> Tensor:
    """[B, S, H] rows of the block -> [B, S, H]. known: keys and values of the new features."""
    q, *own = attention.project(x, angles)
    keys, values = (torch.cat(pair, dim=2) for pair in zip(known, own, strict=True))
    columns = cache.update(keys, values)
    out = F.scaled_dot_product_attention(
        q, *columns, attn_mask=mask[:, None], enable_gqa=attention.grouped
    )
    return attention.joined(out)
