"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024, 2401.15077, 2406.16858).

A feature is the target's last hidden state after its final norm. The head reads the feature at
position t and the embedding of token t + 1, and extrapolates the feature at t + 1. The target's
output path turns that feature into the logits of token t + 2. Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    feature       f0   f1   f2   f3   .        from the target
    head sees     f0,b f1,c f2,d f3,e          rotary positions 0 1 2 3
    head returns  f1'  f2'  f3'  f4'           compared with f1 f2 f3; f4' drafts the token after e

EAGLE-3's heads belong to this family: one step turns the feature at position t and the embedding of
token t + 1 into the feature at t + 1. The input of the next step is the feature that the head returned.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import Angles, Attend, Attention, KeyValues, Layer, list_layer_windows
from treespec.heads.llama import LlamaHead
from treespec.heads.unrolled import UnrolledAttention


class FeatureHead(LlamaHead):
    """A head that extrapolates features step by step. Subclasses have decoder layers after `fc`.

    config: `LlamaHead`'s fields, and `embed_scale` (1 if absent), the factor of targets that scale their
    embeddings.
    """

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        scale = target.embed_scale
        if scale != 1.0:
            fields = {"embed_scale": scale} | fields
        return super().build_config(target, **fields)

    @property
    def embed_scale(self) -> float:
        """The factor on embeddings."""
        return float(self.config.get("embed_scale", 1.0))

    @property
    def lacks_embedding(self) -> bool:
        return self.embed_tokens is None

    @property
    @abstractmethod
    def decoder(self) -> list[Layer]:
        """The decoder layers, first to last."""

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each decoder layer."""
        return [layer.self_attn for layer in self.decoder]

    @abstractmethod
    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """Run the layers: [B, T, H] embeddings and features -> [B, T, H] the next features.

        attends: for each decoder layer its attention, with angles, mask and cache bound.
        """

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., F] into the input features [..., H] of a step; unchanged by default."""
        return features

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed | None = None,
    ) -> list[Tensor]:
        """As `Head.forward`; from step 1 on it reads its own features (EAGLE-3, section 3.2). embed: not used."""
        steps_of = self.unroll_steps(tokens, self.fuse(features), steps)
        return [
            self.normalize_hidden(hidden[counts[:, step:]]) for step, hidden in enumerate(steps_of)
        ]

    def unroll_steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Draft from every position at once; from step 1 on the input features are the head's own.

        Args:
            tokens: [B, T] int64.
            features: [B, R, H] fused features of the first R = T - 2 positions.
            steps: the number of draft steps; at most R are computed.

        Yields:
            For each step s, from 0, the next features [B, R - s, H]. Row t is at position t + s + 1.
        """
        attentions = [UnrolledAttention(attention) for attention in self.attentions]
        for step in range(min(steps, features.shape[1])):
            rows = tokens.shape[1] - 2 - step
            positions = torch.arange(step, step + rows, device=features.device)
            angles = self.rotary(positions, features.dtype)
            attends = [partial(attention, angles=angles) for attention in attentions]
            next_tokens = tokens[:, step + 1 : step + 1 + rows]
            embeddings = self.embed_tokens_scaled(next_tokens, features.dtype)
            features = self.extrapolate(embeddings, features[:, :rows], attends)
            yield features

    def forward_step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor | Angles,
        mask: Tensor | None = None,
        caches: Sequence[KeyValues] | None = None,
    ) -> Tensor:
        """Extrapolate one step: from each feature and the token after it to the next feature.

        Args:
            tokens: [B, T] int64, for each feature the token after it.
            features: [B, T, H].
            positions: [T] or [B, T] positions of the features, or their rotary angles (cos and sin).
            mask: [T, P + T] or [B, 1, T, P + T] bool, the columns that each row sees; None is causal.
            caches: for each decoder layer the keys and values of P earlier columns; None: P = 0.

        Returns:
            [B, T, H] the next features.
        """
        angles = positions
        if isinstance(positions, Tensor):
            angles = self.rotary(positions, features.dtype)
        attentions = self.attentions
        stores: Sequence[KeyValues | None] = [None] * len(attentions)
        if caches is not None:
            stores = caches
        attends = [
            partial(attention, angles=angles, mask=mask, cache=cache)
            for attention, cache in zip(attentions, stores, strict=True)
        ]
        return self.extrapolate(self.embed_tokens_scaled(tokens, features.dtype), features, attends)

    def embed_tokens_scaled(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed tokens, with the target's scale: [B, T] int64 -> [B, T, H]."""
        assert self.embed_tokens is not None, "a head without an embedding takes its target's first"
        embedded: Tensor = self.embed_tokens(tokens)
        if self.embed_scale != 1:
            embedded = embedded * self.embed_scale
        return embedded.to(dtype)


@final
class EagleHead(FeatureHead):
    """One decoder layer over fc(cat(embedding, feature)), with the published parameter names.

    config: `FeatureHead`'s fields, and
    - `bias` (true if absent): whether `fc` has a bias.
    - `qkv_bias` (false if absent): whether queries, keys and values have biases.
    - `own_output` (false if absent): whether the head has its own output layer, for
      `draft_vocab_size` tokens. Otherwise it uses the target's.
    - `layer_types` and `sliding_window`, as for `Eagle3Head`: treespec's own fields, which no other project reads.

    Raises ValueError for another layer type, and for a window that is missing.
    """

    kind: str = "eagle"
    known_as: ClassVar[str] = "an EAGLE-1 or EAGLE-2 head"
    cached_layers = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.feature_size = self.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.get("bias", True))
        # Published configs may have the target's number of layers; the head has one.
        (window,) = list_layer_windows(config | {"num_hidden_layers": 1})
        qkv_bias = config.get("qkv_bias", False)
        layer = Layer(self.llama, normed=False, qkv_bias=qkv_bias, window=window)
        self.layers = nn.ModuleList([layer])
        if config.get("own_output"):
            self.draft_first(config.get("draft_vocab_size"))

    @property
    def decoder(self) -> list[Layer]:
        return [cast(Layer, self.layers[0])]

    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        return self.decoder[0](self.fc(torch.cat([embeddings, features], dim=-1)), attends[0])
