"""Hydra's heads (Ankner et al. 2024, 2402.05109): Medusa's, each of which also sees the tokens before its own.

Head i, from 0, at position t drafts token t + 2 + i of the target's last hidden state h and the embeddings e:

    position      0            1            2            3     4
    token         a            b            c            d     e
    head 0 of     c:h0,b       d:h1,c       e:h2,d
    head 1 of     d:h0,b,c     e:h1,c,d

Hydra++ (section 4.2; `hydra_head_arch` "prefix-mlp") puts in place of h what a decoder layer of its own, with the
final norm of a model of one layer, makes of all hidden states up to it.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.layers import MLP, Attention, KeyValues, RMSNorm, Rotary
from treespec.heads.residual import ResBlock, keep_rows

ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}  # by kind


@final
class LlamaLayer(nn.Module):
    """Llama's decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, False, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValues | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


@final
class Prefix(nn.Module):
    """Hydra++'s view of the text: a Llama of one layer over the target's hidden states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LlamaLayer(config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(
        self, states: Tensor, positions: Tensor, mask: Tensor | None = None, cache: KeyValues | None = None
    ) -> Tensor:
        """[B, T, H] hidden states at positions [T] or [B, T] -> [B, T, H]. mask, cache: as `EagleHead` takes them."""
        return self.norm(self.layers[0](states, self.rotary(positions, states.dtype), mask, cache))


@final
class HydraHead(nn.Module):
    """K times `hydra_num_layers` residual blocks and an output layer. Parameter names are the published checkpoint's.

    config: the content of config.json: `hydra_num_heads`, `hydra_num_layers` (1 if absent), `hydra_head_arch` "mlp" or
    "prefix-mlp", `hidden_size`, `vocab_size`, and Llama's fields for the prefix layer. The embeddings are the target's.
    vocabulary: [N] int64 ascending, the target's tokens that it drafts; None is all.
    Raises ValueError for other architectures, and for heads that see no tokens (`grounded_heads` false).
    """

    known_as = "Hydra or Hydra++ heads"
    taps: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.kind = config, kind_of(config)
        try:
            self.max_depth, layers = int(config["hydra_num_heads"]), int(config.get("hydra_num_layers", 1))
            width, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        if min(self.max_depth, layers) < 1:
            raise ValueError("hydra_num_heads and hydra_num_layers must be at least 1")
        if not config.get("grounded_heads", True):
            raise ValueError("grounded_heads is false: such heads see no tokens, and are Medusa's")
        self.hidden_size, self.vocab_size = width, vocab_size
        self.prefix_embeding_layer = Prefix(LlamaConfig(**config)) if self.kind == "hydra++" else None
        gaps = self.kind == "hydra++"
        inputs = [[i + 2] + [1] * (layers - 1) for i in range(self.max_depth)]  # of each head's blocks, in widths
        self.hydra_mlp = nn.ModuleList(in_line([ResBlock(width, n) for n in some], gaps) for some in inputs)
        outputs = (nn.Linear(width, vocab_size) for _ in range(self.max_depth))
        self.hydra_lm_head = nn.ModuleList(in_line([output], gaps) if gaps else output for output in outputs)
        self.vocabulary: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the states that it takes."""
        return next(self.parameters()).dtype

    @property
    def output_layers(self) -> list[nn.Linear]:
        """The last layer of each head."""
        layers: list[Any] = [head[-1] if isinstance(head, nn.Sequential) else head for head in self.hydra_lm_head]
        return layers

    def states(
        self, features: Tensor, positions: Tensor, mask: Tensor | None = None, cache: KeyValues | None = None
    ) -> Tensor:
        """[B, T, H] hidden states of the target at positions [T] or [B, T] -> what the heads see of them.

        mask: [T, P + T] or [B, 1, T, P + T], what each attends to, None is causal.
        """
        if self.prefix_embeding_layer is None:
            return features
        return self.prefix_embeding_layer(features, positions, mask, cache)

    def restrict(self, tokens: Tensor, target: Any = None) -> None:
        """Draft these of the target's tokens alone, [N] int64 ascending."""
        self.vocabulary = tokens
        for layer in self.output_layers:
            keep_rows(layer, tokens)

    @property
    def feature_size(self) -> int:
        return self.hidden_size

    def step(self, i: int, inputs: Tensor) -> Tensor:
        """[..., (i + 2) H], a state and the embeddings of the i + 1 tokens after it -> [..., V] logits of head i."""
        return self.hydra_lm_head[i](self.hydra_mlp[i](inputs))

    def forward(self, features: Tensor, embeddings: Tensor, kept: Tensor) -> list[Tensor]:
        """Logits [M, V] of each head at the M positions of kept [B, T] bool.

        features: [B, T, H] from position 0 on. embeddings: [B, T + K - 1, H] of the tokens after them.
        """
        length = features.shape[1]
        inputs = self.states(features, torch.arange(length, device=features.device))[kept]
        logits = []
        for i in range(self.max_depth):
            inputs = torch.cat([inputs, embeddings[:, i : i + length][kept]], dim=-1)
            logits.append(self.step(i, inputs))
        return logits


def in_line(modules: Sequence[nn.Module], gaps: bool) -> nn.Sequential:
    """gaps: number them as the published Hydra++ does, which has a dropout before each."""
    return nn.Sequential(*(part for module in modules for part in ((nn.Identity(), module) if gaps else (module,))))


def kind_of(config: dict[str, Any]) -> str:
    """Hydra or Hydra++, by the architecture. Raises ValueError for others."""
    given = config.get("hydra_head_arch", "mlp")
    known = [kind for kind, architecture in ARCHITECTURES.items() if architecture == given]
    if not known:
        raise ValueError(f"hydra_head_arch is {given!r}, must be one of {', '.join(ARCHITECTURES.values())}")
    return known[0]
