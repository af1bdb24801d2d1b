"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024, 2401.15077, 2406.16858).

A feature is the target's last hidden state after its final norm. The head sees the feature at
position t with the embedding of token t + 1, and extrapolates the feature at t + 1. The target's
output path turns that into the logits of token t + 2. Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    feature       f0   f1   f2   f3   .        from the target
    head sees     f0,b f1,c f2,d f3,e          rotary positions 0 1 2 3
    head gives    f1'  f2'  f3'  f4'           compared with f1 f2 f3; f4' drafts the token after e
"""

from collections.abc import Sequence
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from treespec.heads.features import FeatureHead
from treespec.heads.head import Config, MappedHead, OutputPath
from treespec.heads.layers import Attend, Attention, Layer


@final
class EagleHead(MappedHead, FeatureHead):
    """One decoder layer over fc(cat(embedding, feature)), with the published parameter names.

    config: the content of config.json, Llama's fields plus `bias` (of fc, true if absent),
    `qkv_bias` (false if absent) and `embed_scale` (1 if absent; for targets that scale their
    embeddings).
    output: rows of the target's output embedding, for a head that is restricted to few tokens. They
    are not saved with the weights.
    """

    kind: str = "eagle"
    known_as: ClassVar[str] = "an EAGLE-1 or EAGLE-2 head"

    def __init__(self, config: Config) -> None:
        llama = LlamaConfig(**config)
        super().__init__(config, llama)
        width = self.feature_size = llama.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.get("bias", True))
        layer = Layer(llama, qkv_bias=config.get("qkv_bias", False), normed=False)
        self.layers = nn.ModuleList([layer])
        self.lm_head: nn.Linear | None = None
        self.output: nn.Module | None = None
        self.draft(None)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.layers.parameters()).dtype

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    @property
    def attentions(self) -> list[Attention]:
        return [self.layer.self_attn]

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's features -> [..., H] the features that `step` takes: the same."""
        return features

    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """[B, T, H] embeddings and features -> [B, T, H] the features that follow."""
        return self.layer(self.fc(torch.cat([embeddings, features], dim=-1)), attends[0])

    def logits(self, hidden: Tensor, target: OutputPath) -> Tensor:
        """[..., H] features of `step` -> [..., N] logits, by the target's output path."""
        return target.output_logits(hidden, self.output)


def config_for(
    target: PretrainedConfig, width: int, vocab_size: int, embed_scale: float = 1.0
) -> Config:
    """The head's config.json for a target: the same widths, head counts and rotary settings.

    width: of the hidden states that enter the target's output embedding. In some models (OPT) it
    differs from `hidden_size`. For targets without rotary positions or gated layers the head takes
    Llama's defaults.
    """
    # 1. Sizes. As attributes, those that differ by layer raise an error.
    fields = target.to_dict()
    fields |= {name: fields.get(stored) for name, stored in target.attribute_map.items()}
    inner = fields.get("intermediate_size") or 4 * width
    heads = fields.get("num_attention_heads") or max(1, width // 64)  # Mamba: none
    if width % heads:
        heads = 1
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": max(inner) if isinstance(inner, list) else inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": fields.get("head_dim") or width // heads,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": fields.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": fields.get("max_position_embeddings") or 2048,
        "bias": True,
    }

    # 2. Rotary positions, and the scale of the embeddings.
    rope = fields.get("rope_parameters") or {}
    if "full_attention" in rope:  # parameters by layer type
        rope = rope["full_attention"]
    if rope:
        rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        config["rope_parameters"] = rope
        config["rope_theta"] = rope.get("rope_theta", 10000.0)
    if embed_scale != 1.0:
        config["embed_scale"] = embed_scale

    # 3. The KV heads must divide the heads.
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        config["num_key_value_heads"] = heads
    return config
