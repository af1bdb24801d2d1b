"""The head of EAGLE-3 (Li et al. 2025, 2503.01840): tapped features in, logits of its own out.

`fc` fuses the target's features at position t, tapped at three layers, into one. The head sees it
with the embedding of token t + 1, and its logits are for token t + 2. To draft deeper, it takes its
layer's output before the last norm as the feature at t + 1. Training does not compare that feature
with the target's.
Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    fused         g0   g1   g2   g3   .        from the target
    head sees     g0,b g1,c g2,d g3,e          rotary positions 0 1 2 3
    head gives    a1   a2   a3   a4            the laws of c, d, e and the token after e
    then sees     a1,c a2,d a3,e               rotary positions 1 2 3
    and gives     b2   b3   b4                 the laws of d, e and the token after e
"""

from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from treespec.heads import eagle
from treespec.heads.features import Attend, FeatureHead
from treespec.heads.head import Config, OutputPath, Tensors
from treespec.heads.layers import MLP, Attention, RMSNorm
from treespec.heads.unrolled import UnrolledAttention

TAPS = 3


@final
class Eagle3Layer(nn.Module):
    """A decoder layer over normed embedding and normed feature; the raw feature is the residual.

    norm_before_residual: the normed feature is the residual, as in some of speculators' heads.
    """

    def __init__(
        self, config: LlamaConfig, qkv_bias: bool, norm_before_residual: bool = False
    ) -> None:
        super().__init__()
        width, self.norm_before_residual = config.hidden_size, norm_before_residual
        self.self_attn = Attention(config, qkv_bias, 2 * width)
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


@final
class Eagle3Head(FeatureHead):
    """Parameter names are the published checkpoint's.

    config: the content of config.json, Llama's fields plus `draft_vocab_size` Vd (V if absent),
    `target_hidden_size` Ht (H if absent), `eagle_aux_hidden_state_layer_ids` (the taps; if absent
    they follow from the target's depth), `qkv_bias` and `norm_before_residual` (false if absent)
    and `embed_scale` (1 if absent). Where Vd is not V, d2t [Vd] int64 says that draft token i is
    the target's i + d2t[i], and t2d [V] bool marks these.
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

        # 2. The modules, by their published names.
        tapped = (len(self.taps) or TAPS) * (config.get("target_hidden_size") or width)
        self.fc = nn.Linear(tapped, width, bias=False)
        residual = config.get("norm_before_residual", False)
        self.midlayer = Eagle3Layer(llama, config.get("qkv_bias", False), residual)
        self.norm = RMSNorm(width, eps=llama.rms_norm_eps)
        self.lm_head = nn.Linear(width, drafted, bias=False)
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        self._draft(None if drafted == self.vocab_size else torch.arange(drafted))

    @property
    def feature_size(self) -> int:
        return self.fc.in_features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of features that `step` takes; the embedding may have the target's dtype."""
        return self.norm.weight.dtype

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    @property
    def vocabulary(self) -> Tensor | None:
        """[Vd] int64: the target's token for each draft token; None: all V, in order."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, tokens: Tensor, features: Tensor, counts: Tensor, steps: int) -> list[Tensor]:
        """Draft from every position at once, on its own features (training-time test, section 3.2).

        tokens: [B, T] int64. features: [B, R, F] the target's at the first R = T - 2 positions.
        counts: [B, R] bool: whether the law of token t + 2 is wanted. steps: at most R are
        computed.
        Returns for each step the normed states [M, H] of its wanted rows, which `lm_head` turns
        into logits. Five tokens, of which d and e are wanted:

            row t     0  1  2
            counts    0  1  1
            step 0    c  d  e       row t of step s is for token t + s + 2,
            step 1    d  e          and is wanted where counts[t + s]
            step 2    e
        """
        hidden, unrolled = self.fuse(features), UnrolledAttention(self.attention)
        states = []
        for step in range(min(steps, counts.shape[1])):
            rows = counts.shape[1] - step
            positions = torch.arange(step, step + rows, device=hidden.device)
            angles = self.rotary(positions, hidden.dtype)
            attend = partial(unrolled, angles=angles)
            embeddings = self.embedded(tokens[:, step + 1 : step + 1 + rows], hidden.dtype)
            hidden = self.extrapolate(embeddings, hidden[:, :rows], attend)
            states.append(self.norm(hidden[counts[:, step:]]))
        return states

    def fuse(self, features: Tensor) -> Tensor:
        """[..., F] the target's features -> [..., H] the features that a step takes."""
        return self.fc(features)

    def extrapolate(self, embeddings: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """[B, T, H] embeddings and features -> [B, T, H] the features that follow, not normed."""
        return self.midlayer(embeddings, features, attend)

    def logits(self, hidden: Tensor, target: OutputPath | None = None) -> Tensor:
        """[..., H] features of `step` -> [..., Vd] logits of its tokens; `target` is not used."""
        return self.lm_head(self.norm(hidden))

    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""
        self.taps = self.taps or default_taps(layers)

    def restrict(self, tokens: Tensor, target: OutputPath | None = None) -> None:
        """Draft only these tokens from now on, [N] int64 ascending: cut lm_head, d2t and t2d."""
        drafted = self.vocabulary
        rows = tokens if drafted is None else torch.isin(drafted, tokens).nonzero().squeeze(1)
        output = nn.Linear(self.hidden_size, len(rows), bias=False, device="meta")
        output.weight = nn.Parameter(self.lm_head.weight.detach()[rows])
        self.lm_head = output
        self.config = self.config | {"draft_vocab_size": len(rows)}
        self._draft(rows if drafted is None else drafted[rows])

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, with or without an embedding.

        Raises ValueError where d2t and t2d disagree.
        """
        super().fill(tensors)
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        """Raises ValueError unless d2t and t2d name the same tokens."""
        if self.d2t is None or self.t2d is None:
            return
        for name, tensor, dtype in (("d2t", self.d2t, torch.int64), ("t2d", self.t2d, torch.bool)):
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is of {tensor.dtype}, must be {dtype}")
        tokens = self.d2t + torch.arange(len(self.d2t))
        if len(outside := tokens[(tokens < 0) | (tokens >= self.vocab_size)]):
            raise ValueError(
                f"d2t leads to token {int(outside[0])}, outside the vocabulary of {self.vocab_size}"
            )
        times = tokens.bincount(minlength=self.vocab_size)
        if len(twice := (times > 1).nonzero()):
            raise ValueError(f"d2t leads to token {int(twice[0])} twice")
        if len(other := ((times > 0) != self.t2d).nonzero()):
            raise ValueError(
                "t2d does not mark the tokens that d2t leads to: they differ at token "
                f"{int(other[0])}"
            )

    def _draft(self, tokens: Tensor | None) -> None:
        """Set d2t and t2d for these tokens of the target, [Vd]; None: all, without either."""
        d2t = t2d = None
        if tokens is not None and len(tokens) != self.vocab_size:
            d2t = tokens - torch.arange(len(tokens), device=tokens.device)
            t2d = torch.zeros(self.vocab_size, dtype=torch.bool, device=tokens.device).index_fill(
                0, tokens, True
            )
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)


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
