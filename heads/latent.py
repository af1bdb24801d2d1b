"""Latent attention (MLA) in an EAGLE-3 head, as in DeepSeek-V3 and Kimi K2: one narrow state a position for all heads.

    x ── kv_a_proj_with_mqa ──┬─ latent [r] ── norm ── kv_b_proj ──┬─ keys [heads, nope]
                              │                                    └─ values [heads, v]
                              └─ rotated part of the keys [rope], the same for all heads
    x ── q_a_proj ── norm ── q_b_proj ── queries [heads, nope + rope]

The cache holds keys and values of all heads, not the latent: a head has one layer. Values are filled up with zeros to
the width of the keys, so that the rest of treespec sees an attention as any other. Read in vLLM's `deepseek_eagle3.py`
(commit 03590193) and in transformers' DeepSeek-V3, on 29 November 2026.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import Config
from treespec.heads.layers import Angles, Attention, AttentionParts, RMSNorm, rotate

LATENT_MODELS = ("deepseek_v2", "deepseek_v3", "kimi_k2", "llama")


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a latent attention, by their names in config.json.

    Attributes:
        q_lora_rank: width of the queries' latent; 0: queries come from one product.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: a head's part of queries and keys that is not rotated.
        qk_rope_head_dim: the part that is rotated.
        v_head_dim: a head's width of values.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def query_width(self) -> int:
        """A head's width of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def read_latent_sizes(config: Config) -> LatentSizes | None:
    """Read the sizes of a latent attention; None if the config has none.

    Raises ValueError for a size that is no whole number, and for another model's attention.
    """
    if not config.get("kv_lora_rank"):
        return None
    model = config.get("model_type", "llama")
    if model not in LATENT_MODELS:
        raise ValueError(
            f"model_type is {model!r}: latent attention is read of {', '.join(LATENT_MODELS)}"
        )
    sizes = {"q_lora_rank": config.get("q_lora_rank") or 0}
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, must be a whole number, at least 1")
        sizes[name] = value
    latent = LatentSizes(**sizes)
    if latent.v_head_dim > latent.query_width:
        raise ValueError(
            f"v_head_dim is {latent.v_head_dim}, wider than keys of {latent.query_width}"
        )
    return latent


def scale_queries(rope: Any) -> float:
    """The factor on queries by the rotary parameters: yarn's, squared, for `mscale_all_dim`; else 1.

    Raises ValueError for another type than default and yarn.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type is {kind!r}: latent attention is read with default and yarn")
    strength = rope.get("mscale_all_dim", 0)
    if kind == "default" or not strength or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * strength * math.log(rope["factor"]) + 1.0) ** 2)


def join_pairs(x: Tensor) -> Tensor:
    """Move neighbours, which DeepSeek rotates together, half a width apart: [a, A, b, B] -> [a, b, A, B]."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@final
class LatentAttention(Attention):
    """An attention whose keys and values come from one latent a position; angles of `qk_rope_head_dim` entries."""

    def __init__(
        self, config: LlamaConfig, in_features: int, sizes: LatentSizes, window: int | None = None
    ) -> None:
        """config: Llama's fields. in_features: width of the input. window: as for `Attention`."""
        nn.Module.__init__(self)  # `Attention` would build other products
        heads = config.num_attention_heads
        eps = config.rms_norm_eps
        self.sizes = sizes
        self.heads = heads
        self.grouped = False
        self.window = window
        self.query_scale = scale_queries(config.rope_parameters)
        queries = heads * sizes.query_width
        if sizes.q_lora_rank:
            self.q_a_proj = nn.Linear(in_features, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(in_features, queries, bias=False)
        latent = sizes.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(
            in_features, latent + sizes.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(latent, eps=eps)
        keys_and_values = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = nn.Linear(latent, keys_and_values, bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, config.hidden_size, bias=False)

    def project(self, x: Tensor, angles: Angles, context: Tensor | None = None) -> AttentionParts:
        """As `Attention.project`, without a context. Values have the width of keys, their last entries are 0."""
        assert context is None, "block heads have no latent attention"
        sizes = self.sizes
        cos, sin = angles

        # 1. Queries.
        plain, rotated = self.split_query_heads(self.project_queries(x))
        rotated = rotate(join_pairs(rotated), cos, sin)
        queries = torch.cat([plain, rotated], dim=-1) * self.query_scale

        # 2. Keys and values.
        latent, shared = self.kv_a_proj_with_mqa(x).split(
            [sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1
        )
        parts = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        plain, values = parts.transpose(1, 2).split(
            [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1
        )
        shared = rotate(join_pairs(shared)[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        keys = torch.cat([plain, shared], dim=-1)
        return AttentionParts(
            queries, keys, F.pad(values, (0, sizes.query_width - sizes.v_head_dim))
        )

    def project_queries(self, x: Tensor) -> Tensor:
        """[B, T, in] -> [B, T, heads (nope + rope)]."""
        if not self.sizes.q_lora_rank:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def split_query_heads(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, heads (nope + rope)] -> [B, heads, T, nope], [B, heads, T, rope]."""
        by_head = queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, rotated = by_head.split(
            [self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], dim=-1
        )
        return plain, rotated

    def extend(self, out: Tensor) -> Tensor:
        """As `Attention.extend`, without the filling of the values."""
        return super().extend(out[..., : self.sizes.v_head_dim])
