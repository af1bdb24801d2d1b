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
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.block import BlockHead, Embed, check_mask_token
from treespec.heads.draft_map import check_mapping, mapping_of, restricted, tokens_of
from treespec.heads.eagle3_layer import windows_of
from treespec.heads.head import Config, OutputPath, Tensors
from treespec.heads.layers import Attention, KeyValues, NormedLayer, RMSNorm, Rotary, rotate

EMBEDDING = "embed_tokens.weight"


@final
class DFlashHead(BlockHead):
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
        tapped = len(self.taps) * (config.get("target_hidden_size") or width)
        self.fc = nn.Linear(tapped, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        layers = [NormedLayer(llama, qk_norm=True) for _ in self.windows]
        self.layers, self.rotary = nn.ModuleList(layers), Rotary(llama)
        embedding = nn.Embedding(self.vocab_size, width).requires_grad_(False)
        self.embed_tokens: nn.Embedding | None = embedding
        self.output: nn.Module | None = None
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        drafted = config.get("draft_vocab_size") or self.vocab_size
        if config.get("own_output"):
            self.lm_head = nn.Linear(width, drafted, bias=False)
        self._draft(None if drafted == self.vocab_size else torch.arange(drafted))

    @property
    def vocabulary(self) -> Tensor | None:
        return tokens_of(self.d2t)

    @property
    def hidden_size(self) -> int:
        return self.fc.out_features

    @property
    def feature_size(self) -> int:
        return self.fc.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def lacks_embedding(self) -> bool:
        return False  # `run` is given the target's

    def settle_taps(self, layers: int) -> None:
        """Its config names them."""

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        own = self.embed_tokens  # None: `run` is given the target's, which a target may scale
        if own is None or isinstance(weight, nn.Module):
            return
        if own.weight.device == weight.device and torch.equal(own.weight, weight):
            own.weight = weight

    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        drafted = self.vocabulary
        if self.lm_head is not None:
            self.lm_head, kept = restricted(self.lm_head, drafted, tokens)
            self.config = self.config | {"draft_vocab_size": len(kept)}
        else:
            kept = tokens if drafted is None else drafted[torch.isin(drafted, tokens)]
            self.output = target.output_rows(kept)
        self._draft(kept)

    def fill(self, tensors: Tensors) -> None:
        if EMBEDDING not in tensors:
            self.embed_tokens = None
        self.load_state_dict(tensors, assign=True)
        check_mapping(self.d2t, self.t2d, self.vocab_size)

    def run(
        self,
        tokens: Tensor,
        features: Tensor,
        roots: Tensor | None,
        places: Tensor,
        seen: Tensor,
        caches: Sequence[KeyValues],
        embed: Embed,
    ) -> tuple[Tensor | None, Tensor]:
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
            layer = cast(NormedLayer, module)
            keys, values = self._keys_values(layer.self_attn, context, before)
            if roots is None:
                cache.update(keys, values)
                continue
            mask = self._mask(number, places, seen[:, n:])
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), within)
            keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            out = F.scaled_dot_product_attention(
                *(q, *cache.update(keys, values)),
                attn_mask=mask[:, None],
                enable_gqa=layer.self_attn.grouped,
            )
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
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

    @staticmethod
    def _keys_values(
        attention: Attention, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> keys, rotated, and values [B, kv heads, T, D], without queries."""
        keys, values = (
            proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.k_proj, attention.v_proj)
        )
        assert attention.k_norm is not None
        return rotate(attention.k_norm(keys), *angles), values

    def drafted(self, last: Tensor | None, block: Tensor) -> Tensor:
        return block if self.from_anchor else block[:, 1:]

    def logits(self, states: Tensor, target: OutputPath) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(states)
        return target.output_logits(states, self.output)

    def _draft(self, tokens: Tensor | None) -> None:
        """Set d2t and t2d for these tokens of the target, [N]; None: all, without either.

        They are saved with an output layer of the head's own.
        """
        for name, value in zip(("d2t", "t2d"), mapping_of(tokens, self.vocab_size), strict=True):
            self.register_buffer(name, value, persistent=self.lm_head is not None)
