"""What the heads of EAGLE-1 and EAGLE-3 share: they extrapolate features of the target.

A step takes the feature at position t and the embedding of token t + 1, and returns the feature at
t + 1. To draft deeper, the head takes the features that it returned.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.head import Config, OutputPath, Tensors
from treespec.heads.layers import Attention, KeyValues, Rotary

EMBEDDING = "embed_tokens.weight"

Attend = Callable[[Tensor], Tensor]  # [B, T, in] -> [B, T, H]: a layer's attention at a step


class FeatureHead(nn.Module, ABC):
    """A head that drafts by features. Its subclass has one decoder layer or more behind `fc`.

    config: the content of config.json, with Llama's fields and `embed_scale` (1 if absent; for
    targets that scale their embeddings).
    embed_tokens: None where the checkpoint has none and no target has given its own yet.
    """

    kind: str
    known_as: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset({EMBEDDING})
    max_depth: int | None = None
    taps: tuple[int, ...] = ()
    embed_tokens: nn.Module | None
    fc: nn.Linear

    def __init__(self, config: Config, llama: LlamaConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, llama.vocab_size
        self.embed_scale = float(config.get("embed_scale", 1.0))
        self.rotary = Rotary(llama)
        embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
        self.embed_tokens = embedding.requires_grad_(False)

    @property
    def hidden_size(self) -> int:
        """H, the width of the features that `step` takes and gives."""
        return self.fc.out_features

    @property
    def lacks_embedding(self) -> bool:
        return self.embed_tokens is None

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """F, the width of the target's features, all taps together."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of features that `step` takes; the embedding may have the target's dtype."""

    @property
    @abstractmethod
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""

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

    @abstractmethod
    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        """Draft only these of the target's tokens from now on, [N] int64 ascending."""

    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, whose names and shapes are right, with or without embedding.

        Raises ValueError where they contradict each other.
        """
        if EMBEDDING not in tensors:
            self.embed_tokens = None
        self.load_state_dict(tensors, assign=True)

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
