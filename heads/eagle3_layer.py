"""The first decoder layer of EAGLE-3, and how far each layer of its heads looks back."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.features import Attend
from treespec.heads.head import Config
from treespec.heads.layers import MLP, Attention, RMSNorm

FULL, SLIDING = "full_attention", "sliding_attention"


@final
class Eagle3Layer(nn.Module):
    """A decoder layer over normed embedding and normed feature; the raw feature is the residual.

    norm_before_residual: the normed feature is the residual, as in some of speculators' heads.
    """

    def __init__(
        self,
        config: LlamaConfig,
        qkv_bias: bool,
        norm_before_residual: bool = False,
        *,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        width, self.norm_before_residual = config.hidden_size, norm_before_residual
        self.self_attn = Attention(config, qkv_bias, 2 * width, qk_norm=qk_norm, window=window)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.input_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, eps=config.rms_norm_eps)

    def forward(self, embeddings: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] embeddings and features -> [B, T, H]. attend: [B, T, 2H] -> [B, T, H]."""
        normed = self.hidden_norm(features)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        x = (normed if self.norm_before_residual else features) + attend(x)
        return x + self.mlp(self.post_attention_layernorm(x))


def windows_of(config: Config) -> list[int | None]:
    """For each layer the positions that it sees, its own included; None: all before it.

    Raises ValueError for layer types that no EAGLE-3 head has, and for a window that is missing.
    """
    layers = config.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"num_hidden_layers is {layers!r}, must be at least 1")
    types: Sequence[str] = config.get("layer_types") or [FULL] * layers
    if len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
    if other := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise ValueError(f"layer_types has {other[0]!r}, must be {FULL} or {SLIDING}")
    window = config.get("sliding_window")
    if SLIDING in types and (not isinstance(window, int) or window < 1):
        raise ValueError(f"layer_types has {SLIDING}, and sliding_window is {window!r}")
    return [window if kind == SLIDING else None for kind in types]
