"""The head of EAGLE-3 (Li et al. 2025, 2503.01840): tapped features in, logits of its own out.

`fc` fuses the target's features at position t, tapped at three layers, into one. The head sees it
with the embedding of token t + 1, and its logits are for token t + 2. To draft deeper, it takes its
last layer's output as the feature at t + 1: before the last norm, or, in EAGLE-3.1, after it.
Training does not compare that feature with the target's.
Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    fused         g0   g1   g2   g3   .        from the target
    head sees     g0,b g1,c g2,d g3,e          rotary positions 0 1 2 3
    head gives    a1   a2   a3   a4            the laws of c, d, e and the token after e
    then sees     a1,c a2,d a3,e               rotary positions 1 2 3
    and gives     b2   b3   b4                 the laws of d, e and the token after e
"""

from collections.abc import Sequence
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from treespec.heads import eagle
from treespec.heads.features import FeatureHead
from treespec.heads.head import Config, MappedHead, OutputPath
from treespec.heads.layers import Attend, Attention, Eagle3Layer, Layer, RMSNorm, windows_of

TAPS = 3


@final
class Eagle3Head(MappedHead, FeatureHead):
    """Parameter names are the published checkpoint's.

    config: the content of config.json, Llama's fields plus
    - `draft_vocab_size` Vd (V if absent). Where Vd is not V, d2t [Vd] int64 says that draft token i
      is the target's i + d2t[i], and t2d [V] bool marks these.
    - `target_hidden_size` Ht (H if absent), `eagle_aux_hidden_state_layer_ids` (the taps; if absent
      they follow from the target's depth), and `embed_scale` (1 if absent).
    - `num_hidden_layers` (1 if absent). The first layer is `midlayer`, the next ones are Llama's.
    - `layer_types`, one for each layer: "full_attention", which all are if it is absent, or
      "sliding_attention", which sees `sliding_window` positions, its own included.
    - `qkv_bias` and `norm_before_residual`, of the first layer, and `qk_norm`, which makes all
      layers Qwen3's (false if absent).
    - EAGLE-3.1's norms (false if absent). `norm_before_fc`: one over all taps together, before
      `fc`. `fc_norm`: one for each tap. `norm_output`: the normed state is the next feature, and
      the plain one otherwise; the logits come from the normed state in any case.

    Raises ValueError for `norm_before_fc` together with `fc_norm`, and for layers of other types.
    """

    kind: str = "eagle3"
    known_as: ClassVar[str] = "an EAGLE-3 head"

    def __init__(self, config: Config) -> None:
        # 1. What the config says.
        llama = LlamaConfig(**config)
        super().__init__(config, llama)
        width = llama.hidden_size
        drafted = config.get("draft_vocab_size") or self.vocab_size
        if drafted > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {drafted}, of a vocabulary of {self.vocab_size}")
        self.taps = tuple(int(k) for k in config.get("eagle_aux_hidden_state_layer_ids") or ())
        if config.get("norm_before_fc") and config.get("fc_norm"):
            raise ValueError("norm_before_fc and fc_norm are both true, and exclude each other")
        self.norm_output = bool(config.get("norm_output"))
        first_window, *windows = windows_of(config)

        # 2. The modules, by their published names.
        taps, eps = len(self.taps) or TAPS, llama.rms_norm_eps
        tap_width = config.get("target_hidden_size") or width
        self.feature_size = taps * tap_width
        self.fc = nn.Linear(taps * tap_width, width, bias=False)
        self.input_norm: RMSNorm | None = None
        self.fc_norm: nn.ModuleList | None = None
        if config.get("norm_before_fc"):
            self.input_norm = RMSNorm(taps * tap_width, eps=eps)
        if config.get("fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(tap_width, eps=eps) for _ in range(taps))
        qk_norm = bool(config.get("qk_norm"))
        self.midlayer = Eagle3Layer(
            llama,
            norm_before_residual=config.get("norm_before_residual", False),
            qkv_bias=config.get("qkv_bias", False),
            qk_norm=qk_norm,
            window=first_window,
        )
        self.layers = nn.ModuleDict()
        for number, window in enumerate(windows, start=1):
            self.layers[str(number)] = Layer(llama, qk_norm=qk_norm, window=window)
        self.norm = RMSNorm(width, eps=eps)
        self.lm_head: nn.Linear = nn.Linear(width, drafted, bias=False)
        self.draft(None if drafted == self.vocab_size else torch.arange(drafted))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def later_layers(self) -> list[Layer]:
        """The layers after the first."""
        return [cast(Layer, layer) for layer in self.layers.values()]

    @property
    def attentions(self) -> list[Attention]:
        return [self.midlayer.self_attn, *(layer.self_attn for layer in self.later_layers)]

    def fuse(self, features: Tensor) -> Tensor:
        """[..., F] the target's features -> [..., H] the features that a step takes."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """[B, T, H] embeddings and features -> [B, T, H] the features that follow.

        They are normed if `norm_output` says so.
        """
        first, *later = attends
        hidden = self.midlayer(embeddings, features, first)
        for layer, attend in zip(self.later_layers, later, strict=True):
            hidden = layer(hidden, attend)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor, target: OutputPath | None = None) -> Tensor:
        """[..., H] features of `step` -> [..., Vd] logits of its tokens; `target` is not used."""
        return self.lm_head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """[..., H] features of `step` -> [..., H] what `lm_head` takes."""
        return hidden if self.norm_output else self.norm(hidden)

    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""
        self.taps = self.taps or default_taps(layers)


def config_for(
    target: PretrainedConfig,
    width: int,
    vocab_size: int,
    taps: tuple[int, ...],
    embed_scale: float = 1.0,
) -> Config:
    """The head's config.json for a target's (text) config, as `eagle.config_for`.

    width: of the target's embedding.
    """
    config = eagle.config_for(target, width, vocab_size, embed_scale)
    del config["bias"]
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocab_size,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(taps),
    }


def default_taps(layers: int) -> tuple[int, int, int]:
    """The published taps for `layers` target layers: the inputs of a low, middle and high layer.

    In a target of fewer than 7 layers these are not distinct and ascending; there, take the inputs
    of the last three layers.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return max(layers - 3, 0), max(layers - 2, 0), layers - 1
