"""What the heads of EAGLE-1 and EAGLE-3 share: they extrapolate features of the target.

A step takes the feature at position t and the embedding of token t + 1, and returns the feature at
t + 1. To draft deeper, the head takes the features that it returned.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import EMBEDDING, Config, Head, OutputPath
from treespec.heads.layers import Attend, Attention, KeyValues, Rotary
from treespec.heads.unrolled import UnrolledAttention


class FeatureHead(Head):
    """A head that drafts by features. Its subclass has one decoder layer or more behind `fc`.

    config: the content of config.json, with Llama's fields and `embed_scale` (1 if absent; for
    targets that scale their embeddings).
    """

    optional: ClassVar[frozenset[str]] = frozenset({EMBEDDING})

    def __init__(self, config: Config, llama: LlamaConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, llama.vocab_size
        self.hidden_size = llama.hidden_size
        self.embed_scale = float(config.get("embed_scale", 1.0))
        self.rotary = Rotary(llama)
        embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
        self.embed_tokens = embedding.requires_grad_(False)

    @property
    def lacks_embedding(self) -> bool:
        return self.embed_tokens is None

    @property
    @abstractmethod
    def attentions(self) -> Sequence[Attention]:
        """The attention of each decoder layer."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., F] the target's features -> [..., H] the features that `step` takes."""

    @abstractmethod
    def extrapolate(
        self, embeddings: Tensor, features: Tensor, attends: Sequence[Attend]
    ) -> Tensor:
        """[B, T, H] embeddings and features -> [B, T, H] the features that follow.

        attends: one for each decoder layer.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, target: OutputPath) -> Tensor:
        """[..., H] features of `step` -> [..., N] logits of the draft tokens."""

    def forward(self, tokens: Tensor, features: Tensor, counts: Tensor, steps: int) -> list[Tensor]:
        """Draft from every position at once, on its own features (training-time test, section 3.2).

        tokens: [B, T] int64. features: [B, R, F] the target's at the first R = T - 2 positions.
        counts: [B, R] bool: whether the law of token t + 2 is wanted. steps: at most R are
        computed.
        Returns for each step the states [M, H] of its wanted rows, which the output layer turns into
        logits. Five tokens, of which d and e are wanted:

            row t     0  1  2
            counts    0  1  1
            step 0    c  d  e       row t of step s is for token t + s + 2,
            step 1    d  e          and is wanted where counts[t + s]
            step 2    e
        """
        steps_of = self.unrolled(tokens, self.fuse(features), steps)
        return [self.normed(hidden[counts[:, step:]]) for step, hidden in enumerate(steps_of)]

    def normed(self, hidden: Tensor) -> Tensor:
        """[..., H] features of `step` -> [..., H] what the output layer takes: the same."""
        return hidden

    def unrolled(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Draft from every position at once, from step 2 on the head's own features; for training.

        tokens: [B, T] int64. features: [B, R, H] fused, of the first R = T - 2 positions. steps: at
        most R are computed. Yields for each step s, from 0, the features [B, R - s, H] that follow:
        row t stands for position t + s + 1.
        """
        attentions = [UnrolledAttention(attention) for attention in self.attentions]
        for step in range(min(steps, features.shape[1])):
            rows = tokens.shape[1] - 2 - step
            positions = torch.arange(step, step + rows, device=features.device)
            angles = self.rotary(positions, features.dtype)
            attends = [partial(attention, angles=angles) for attention in attentions]
            embeddings = self.embedded(tokens[:, step + 1 : step + 1 + rows], features.dtype)
            features = self.extrapolate(embeddings, features[:, :rows], attends)
            yield features

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        caches: Sequence[KeyValues] | None = None,
    ) -> Tensor:
        """[B, T] tokens and [B, T, H] features -> [B, T, H] the features that follow.

        tokens: int64, each the one after its feature. positions: [T] or [B, T] of the features.
        mask: [T, P + T] or [B, 1, T, P + T] bool, what each position attends to; None is causal.
        caches: keys and values of each decoder layer.
        """
        angles = self.rotary(positions, features.dtype)
        attends = [
            partial(
                attention, angles=angles, mask=mask, cache=None if caches is None else caches[i]
            )
            for i, attention in enumerate(self.attentions)
        ]
        return self.extrapolate(self.embedded(tokens, features.dtype), features, attends)

    def embedded(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T] int64 -> [B, T, H] embeddings, scaled as the target's are."""
        assert self.embed_tokens is not None, "a head without an embedding takes its target's first"
        embeddings = self.embed_tokens(tokens)
        if self.embed_scale != 1.0:
            embeddings = embeddings * self.embed_scale
        return embeddings.to(dtype)

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Take the target's embedding [V, H], if the head has none or an equal copy.

        weight: its weight, or the module itself where that holds no plain matrix.
        """
        if isinstance(weight, nn.Module):
            self.embed_tokens = self.embed_tokens or weight
            return
        own = self.embed_tokens or nn.Embedding.from_pretrained(weight)
        assert isinstance(own.weight, nn.Parameter)
        if own.weight.device == weight.device and torch.equal(own.weight, weight):
            own.weight = weight
        self.embed_tokens = own
