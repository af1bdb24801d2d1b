"""The head of EAGLE-3 (Li et al. 2025, 2503.01840): aux hidden states in, logits of its own out.

`fc` fuses the target's hidden states at position t, of three aux layers, into one. The head sees it
with the embedding of token t + 1, and its logits are for token t + 2. To draft deeper, it takes its
last layer's output as the feature at t + 1: before the last norm, or, in EAGLE-3.1, after it.
Training does not compare that feature with the target's.
Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    fused         g0   g1   g2   g3   .        from the target
    head sees     g0,b g1,c g2,d g3,e          rotary positions 0 1 2 3
    head gives    a1   a2   a3   a4            for c, d, e and the token after e
    then sees     a1,c a2,d a3,e               rotary positions 1 2 3
    and gives     b2   b3   b4                 for d, e and the token after e
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from treespec.heads.eagle import FeatureHead
from treespec.heads.head import Config, TargetFacts
from treespec.heads.layers import Attend, Eagle3Layer, Layer, RMSNorm, list_layer_windows

AUX_LAYERS = 3


class Eagle3Head(FeatureHead):
    """Parameter names are the published checkpoint's.

    config: the content of config.json, Llama's fields plus
    - `draft_vocab_size` Vd (V if absent). Where Vd is not V, d2t [Vd] int64 says that draft token i
      is the target's i + d2t[i], and t2d [V] bool marks these.
    - `target_hidden_size` Ht (H if absent), `eagle_aux_hidden_state_layer_ids` (the aux layers; if
      absent they follow from the target's depth), and `embed_scale` (1 if absent).
    - `own_output` (true if absent): whether it has an output layer of its own, or the target's.
    - `num_hidden_layers` (1 if absent). The first layer is `midlayer`, the next ones are Llama's.
    - `layer_types`, one for each layer: "full_attention", which all are if it is absent, or
      "sliding_attention", which sees `sliding_window` positions, its own included.
    - `qkv_bias` and `norm_before_residual`, of the first layer, and `qk_norm`, which makes all
      layers Qwen3's (false if absent).
    - EAGLE-3.1's norms (false if absent). `norm_before_fc`: one over all aux hidden states together,
      before `fc`. `fc_norm`: one for each of them. `norm_output`: the normed state is the next feature, and
      the plain one otherwise; the logits come from the normed state in any case.

    Raises ValueError for `norm_before_fc` together with `fc_norm`, and for layers of other types.
    """

    kind: str = "eagle3"
    known_as: ClassVar[str] = "an EAGLE-3 head"

    def __init__(self, config: Config) -> None:
        # 1. What the config says.
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

        # 2. The modules, by their published names.
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
        self.layers = nn.ModuleDict()
        for number, window in enumerate(windows[1:], start=1):
            self.layers[str(number)] = Layer(self.llama, qk_norm=qk_norm, window=window)
        self.norm = RMSNorm(width, eps=self.llama.rms_norm_eps)
        if config.get("own_output", True):
            self.draft_first(drafted)

    def add_fusion_norms(self, count: int, width: int) -> None:
        """Add the norms before `fc`: over all aux hidden states together, over each of them, or none.

        Args:
            count: aux hidden states of a position.
            width: of one of them, Ht.

        Raises:
            ValueError: for a config that asks for both.
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
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.config.hidden_size,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(list_default_aux_layers(target.layers)),
        }
        return super().build_config(target, **own | fields)

    @property
    def decoder(self) -> list[Layer]:
        later = [cast(Layer, layer) for layer in self.layers.values()]
        return [self.midlayer] + later

    def fuse(self, features: Tensor) -> Tensor:
        aux = self.input_norm(features).chunk(len(self.fc_norm), dim=-1)
        normed = [norm(state) for norm, state in zip(self.fc_norm, aux, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """As for `FeatureHead`; they are normed if `norm_output` says so."""
        hidden = torch.cat([embeddings, features], dim=-1)
        for layer, attend in zip(self.decoder, attends, strict=True):
            hidden = layer(hidden, attend)
        if self.norm_output:
            return self.norm(hidden)
        return hidden

    def normalize_hidden(self, hidden: Tensor) -> Tensor:
        if self.norm_output:
            return hidden
        return self.norm(hidden)

    def set_default_aux_layers(self, layers: int) -> None:
        """If the config names no aux layers, take those published for `layers` layers."""
        if not self.aux_layers:
            self.aux_layers = list_default_aux_layers(layers)


def check_distinct_layers(ids: Iterable[Any]) -> tuple[int, ...]:
    """The aux layers of a config. Raises ValueError for one that stands twice.

    Layer 0 may: the published layers of a target of one or two layers repeat it.
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
    """The published ones for `layers` target layers: the inputs of a low, middle and high layer.

    In a target of fewer than 7 layers these are not distinct and ascending; there, take the inputs
    of the last three layers.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return max(layers - 3, 0), max(layers - 2, 0), layers - 1
