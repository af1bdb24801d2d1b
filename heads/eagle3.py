"""The head of EAGLE-3 (Li et al. 2025, 2503.01840): it reads aux hidden states, and has its own output layer.

`fc` fuses the target's hidden states at position t, from three aux layers, into one feature. The head
reads this feature and the embedding of token t + 1; its logits are for token t + 2. In the next draft step
the feature at t + 1 is the output of its last layer: before the last norm, or, in EAGLE-3.1, after it.
Training does not compare that feature with the target's.
Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    fused         g0   g1   g2   g3   .        from the target
    head sees     g0,b g1,c g2,d g3,e          rotary positions 0 1 2 3
    head returns  a1   a2   a3   a4            for c, d, e and the token after e
    then sees     a1,c a2,d a3,e               rotary positions 1 2 3
    and returns   b2   b3   b4                 for d, e and the token after e
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from treespec.heads.eagle import FeatureHead
from treespec.heads.head import Config, TargetFacts
from treespec.heads.latent import LatentAttention, read_latent_sizes
from treespec.heads.layers import (
    Attend,
    Eagle3Layer,
    Layer,
    RMSNorm,
    Rotary,
    list_layer_windows,
)

AUX_LAYERS = 3


class Eagle3Head(FeatureHead):
    """EAGLE-3's head, with the published parameter names.

    config: the content of config.json, Llama's fields plus
    - `draft_vocab_size` Vd (V if absent). If Vd is less than V, the tensors d2t and t2d are the draft vocabulary
      (see `Head`).
    - `target_hidden_size` Ht (H if absent): width of an aux hidden state.
    - `eagle_aux_hidden_state_layer_ids`: the aux layers (if absent, `list_default_aux_layers`).
    - `embed_scale` (1 if absent).
    - `own_output` (true if absent): whether the head has its own output layer, or uses the target's.
    - `num_hidden_layers` (1 if absent). The first layer is `midlayer`, later ones are Llama's.
    - `layer_types`: for each layer "full_attention" (if absent) or "sliding_attention", in which a row sees
      `sliding_window` positions, its own included.
    - `qkv_bias`, `norm_before_residual` (false if absent): options of the first layer.
    - `qk_norm` (false if absent): all layers are Qwen3's.
    - `kv_lora_rank` and the further sizes of `LatentSizes`: the only layer has a latent attention.
    - EAGLE-3.1's norms (false if absent). `norm_before_fc`: one norm over all aux hidden states together, before
      `fc`. `fc_norm`: a norm for each aux hidden state. `norm_output`: the next step's feature is the state
      after the last norm, not the one before it. The logits come from the normed state in both cases.

    Raises ValueError for `norm_before_fc` together with `fc_norm`, and for layers of other types.
    """

    kind: str = "eagle3"
    known_as: ClassVar[str] = "an EAGLE-3 head"

    def __init__(self, config: Config) -> None:
        # 1. Read the config.
        super().__init__(config)
        width = self.hidden_size
        drafted = config.get("draft_vocab_size") or self.vocab_size
        if drafted > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {drafted}, of a vocabulary of {self.vocab_size}")
        self.aux_layers = check_distinct_layers(
            config.get("eagle_aux_hidden_state_layer_ids") or ()
        )
        self.norm_output = bool(config.get("norm_output"))
        windows = list_layer_windows(config)
        self.cached_layers = len(windows)

        # 2. Build the modules, by their published names.
        count = len(self.aux_layers) or AUX_LAYERS
        aux_width = config.get("target_hidden_size") or width
        self.feature_size = count * aux_width
        self.fc = nn.Linear(self.feature_size, width, bias=False)
        self.add_fusion_norms(count, aux_width)
        qk_norm = bool(config.get("qk_norm"))
        self.midlayer = Eagle3Layer(
            self.llama,
            norm_before_residual=config.get("norm_before_residual", False),
            qkv_bias=config.get("qkv_bias", False),
            qk_norm=qk_norm,
            window=windows[0],
        )
        self.use_latent_attention(windows)
        self.layers = nn.ModuleDict()
        for number, window in enumerate(windows[1:], start=1):
            self.layers[str(number)] = Layer(self.llama, qk_norm=qk_norm, window=window)
        self.norm = RMSNorm(width, eps=self.llama.rms_norm_eps)
        if config.get("own_output", True):
            self.draft_first(drafted)

    def use_latent_attention(self, windows: Sequence[int | None]) -> None:
        """Give the layer a latent attention, if the config has `kv_lora_rank`, and its rotary angles.

        windows: of each layer. Raises ValueError for a second layer, and as `read_latent_sizes`.
        """
        sizes = read_latent_sizes(self.config)
        if sizes is None:
            return
        if len(windows) > 1:
            raise ValueError(
                "num_hidden_layers is more than 1: with latent attention one layer is read"
            )
        attention = LatentAttention(self.llama, 2 * self.hidden_size, sizes, windows[0])
        self.midlayer.self_attn = attention
        rotated = copy.deepcopy(self.llama)
        rotated.head_dim = sizes.qk_rope_head_dim
        self.rotary = Rotary(rotated)

    def add_fusion_norms(self, count: int, width: int) -> None:
        """Add the norms before `fc`: one over all aux hidden states together, one for each, or none.

        Args:
            count: the number of aux hidden states of a position.
            width: Ht, the width of one aux hidden state.

        Raises:
            ValueError: if the config asks for both.
        """
        norm_together = bool(self.config.get("norm_before_fc"))
        norm_each = bool(self.config.get("fc_norm"))
        if norm_together and norm_each:
            raise ValueError("norm_before_fc and fc_norm are both true, and exclude each other")
        eps = self.llama.rms_norm_eps
        self.input_norm: nn.Module = nn.Identity()
        if norm_together:
            self.input_norm = RMSNorm(count * width, eps=eps)
        self.fc_norm = nn.ModuleList()
        for _ in range(count):
            norm: nn.Module = nn.Identity()
            if norm_each:
                norm = RMSNorm(width, eps=eps)
            self.fc_norm.append(norm)

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        defaults = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.config.hidden_size,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(list_default_aux_layers(target.layers)),
        }
        return super().build_config(target, **defaults | fields)

    @property
    def decoder(self) -> list[Layer]:
        later = [cast(Layer, layer) for layer in self.layers.values()]
        return [self.midlayer] + later

    def fuse(self, features: Tensor) -> Tensor:
        """As `FeatureHead.fuse`: norm the aux hidden states if the config says so, then `fc`."""
        aux = self.input_norm(features).chunk(len(self.fc_norm), dim=-1)
        normed = [norm(state) for norm, state in zip(self.fc_norm, aux, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """As `FeatureHead.extrapolate`. With `norm_output` the returned features are normed."""
        hidden = torch.cat([embeddings, features], dim=-1)
        for layer, attend in zip(self.decoder, attends, strict=True):
            hidden = layer(hidden, attend)
        if self.norm_output:
            return self.norm(hidden)
        return hidden

    def normalize_hidden(self, hidden: Tensor) -> Tensor:
        """As `LlamaHead.normalize_hidden`: the last norm, unless `extrapolate` applied it."""
        if self.norm_output:
            return hidden
        return self.norm(hidden)

    def set_default_aux_layers(self, layers: int) -> None:
        """If the config names no aux layers, take the published defaults for a target of `layers` layers."""
        if not self.aux_layers:
            self.aux_layers = list_default_aux_layers(layers)


def check_distinct_layers(ids: Iterable[Any]) -> tuple[int, ...]:
    """Turn a config's layer ids into aux layers. Raises ValueError for an id that stands twice.

    Id 0 may repeat: the default aux layers of a target of one or two layers repeat it.
    """
    layers = tuple(int(k) for k in ids)
    repeated = [k for k in layers if k and layers.count(k) > 1]
    if repeated:
        raise ValueError(
            f"the head's layer ids name a layer twice (layer {repeated[0]} is entered by two of them): each has "
            "features of its own; take the ids from the head's repository"
        )
    return layers


def list_default_aux_layers(layers: int) -> tuple[int, int, int]:
    """The published aux layers for a target of `layers` layers: the inputs of a low, middle and high layer.

    For fewer than 7 layers these ids are not distinct and ascending: take the inputs of the last three
    layers then.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return max(layers - 3, 0), max(layers - 2, 0), layers - 1
