"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024, 2401.15077, 2406.16858).

A feature is the target's last hidden state after its final norm. The head sees the feature at
position t with the embedding of token t + 1, and extrapolates the feature at t + 1. The target's
output path turns that into the logits of token t + 2. Five tokens:

    position      0    1    2    3    4
    token         a    b    c    d    e
    feature       f0   f1   f2   f3   .        from the target
    head sees     f0,b f1,c f2,d f3,e          rotary positions 0 1 2 3
    head gives    f1'  f2'  f3'  f4'           compared with f1 f2 f3; f4' drafts the token after e

EAGLE-3's heads are of this family: a step takes the feature at position t and the embedding of
token t + 1, and returns the feature at t + 1. To draft deeper, the head takes the feature that it returned.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import Angles, Attend, Attention, KeyValues, Layer
from treespec.heads.llama import LlamaHead
from treespec.heads.unrolled import UnrolledAttention


class FeatureHead(LlamaHead):
    """A head that drafts by features. Its subclass has one decoder layer or more after `fc`.

    config: as for `LlamaHead`, and `embed_scale` (1 if absent; for targets that scale their
    embeddings).
    """

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        scale = target.embed_scale
        if scale != 1.0:
            fields = {"embed_scale": scale} | fields
        return super().build_config(target, **fields)

    @property
    def embed_scale(self) -> float:
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
        """[B, T, H] embeddings and features -> [B, T, H] the features that follow.

        attends: one for each decoder layer.
        """

    def fuse(self, features: Tensor) -> Tensor:
        """[..., F] the target's features -> [..., H] the features that `step` takes: the same."""
        return features

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed | None = None,
    ) -> list[Tensor]:
        """As `Head.forward`, on its own features (training-time test, section 3.2). embed: not used."""
        steps_of = self.unroll_steps(tokens, self.fuse(features), steps)
        return [
            self.normalize_hidden(hidden[counts[:, step:]]) for step, hidden in enumerate(steps_of)
        ]

    def unroll_steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Draft from every position at once, from step 1 on over the head's own features.

        Args:
            tokens: [B, T] int64.
            features: [B, R, H] fused, of the first R = T - 2 positions.
            steps: draft steps; at most R are computed.

        Yields for each step s, from 0, the features [B, R - s, H] that follow: row t stands for
        position t + s + 1.
        """
        attentions = [UnrolledAttention(attention) for attention in self.attentions]
        for step in range(min(steps, features.shape[1])):
            rows = tokens.shape[1] - 2 - step
            positions = torch.arange(step, step + rows, device=features.device)
            angles = self.rotary(positions, features.dtype)
            attends = [partial(attention, angles=angles) for attention in attentions]
            next_tokens = tokens[:, step + 1 : step + 1 + rows]
            next_tokens, features = self.build_step_inputs(next_tokens, features[:, :rows], step)
            embeddings = self.embed_tokens_scaled(next_tokens, features.dtype)
            features = self.extrapolate(embeddings, features, attends)
            yield features

    def build_step_inputs(
        self, tokens: Tensor, features: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Choose what the rows of a draft step see: the text's tokens, and the features of the step before.

        Args:
            tokens: [B, R] int64 of the text, each the one after its feature.
            features: [B, R, H] the target's at step 0, and then what the head returned.
            step: the number of the draft step, from 0.

        Returns both as the step takes them; a subclass may replace them.
        """
        return tokens, features

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
            tokens: [B, T] int64, each the one after its feature.
            features: [B, T, H].
            positions: [T] or [B, T] of the features, or their rotary angles (cos and sin).
            mask: [T, P + T] or [B, 1, T, P + T] bool, the columns that each row sees; None is causal.
            caches: keys and values of P earlier columns, for each decoder layer; None: there are none.

        Returns [B, T, H] the features that follow.
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
        """[B, T] int64 -> [B, T, H] embeddings, scaled as the target's are."""
        assert self.embed_tokens is not None, "a head without an embedding takes its target's first"
        embedded: Tensor = self.embed_tokens(tokens)
        if self.embed_scale != 1:
            embedded = embedded * self.embed_scale
        return embedded.to(dtype)


@final
class EagleHead(FeatureHead):
    """One decoder layer over fc(cat(embedding, feature)), with the published parameter names.

    config: as for `FeatureHead`, with `bias` (of fc, true if absent), `qkv_bias` (false if absent),
    and `own_output`: whether it has an output layer of its own, of `draft_vocab_size` tokens.
    """

    kind: str = "eagle"
    known_as: ClassVar[str] = "an EAGLE-1 or EAGLE-2 head"
    cached_layers = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.feature_size = self.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.get("bias", True))
        layer = Layer(self.llama, qkv_bias=config.get("qkv_bias", False), normed=False)
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
