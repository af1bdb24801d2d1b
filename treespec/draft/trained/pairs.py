"""Pairs (feature, following token) of the text, which the layers of a draft model take.

EAGLE's heads, block heads and MTP layers read a text as pairs. Five tokens, of which e is the root:

    token      a    b    c    d    e
    feature    f0   f1   f2   f3   .
    pairs      f0,b f1,c f2,d f3,e
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from treespec.draft.proposer import PREFILL_AT, Proposer
from treespec.model.cache import TreeCache
from treespec.model.target import Target

MOST_WAITING = 96  # pairs that a text may collect while it rests without drafts


@final
class Pairs:
    """Pairs of one text that wait for the layers.

    `joined` concatenates them when the layers take them. A resting text adds a pair each cycle, and
    concatenating in each would copy all of them each time.
    """

    def __init__(self, features: Tensor, tokens: Tensor | None = None) -> None:
        """features: [n, F]. tokens: [n] int64, the token after each feature; None if n is 0."""
        if tokens is None:
            tokens = torch.empty(0, dtype=torch.int64, device=features.device)
        self.features, self.tokens = [features], [tokens]
        self.count = len(tokens)

    def __len__(self) -> int:
        return self.count

    def add(self, features: Tensor, tokens: Tensor) -> None:
        """features: [n, F]. tokens: [n] int64."""
        if not self.count:
            self.features, self.tokens = [], []  # the empty tensors may have another dtype
        self.features.append(features)
        self.tokens.append(tokens)
        self.count += len(tokens)

    def joined(self) -> tuple[Tensor, Tensor]:
        """[n, F] features and [n] tokens."""
        if len(self.tokens) > 1:
            self.features, self.tokens = [torch.cat(self.features)], [torch.cat(self.tokens)]
        return self.features[0], self.tokens[0]

    def split(self, length: int) -> "Pairs":
        """Keep the first `length` pairs; return the others."""
        features, tokens = self.joined()
        self.features, self.tokens = [features[:length]], [tokens[:length]]
        self.count = min(length, self.count)
        return Pairs(features[length:], tokens[length:])


class PairProposer(Proposer, Protocol):
    """Drafts with layers that take pairs and keep keys and values of them; one text at first.

    Observed pairs wait until `begin` runs the layers over them. Of a prompt only the last pair
    waits. A subclass has `take`, `begin`, `extend` and `new`, and calls `start` when it is made.
    """

    target: Target
    chunk: int | None  # pairs per forward; None: the target's chunk size
    cache: TreeCache
    waiting: list[Pairs]  # by text
    nothing: Tensor  # [0, F] of the features' dtype and device
    per_text: ClassVar[tuple[str, ...]] = ("waiting", "cache")

    @abstractmethod
    def take(self) -> None:
        """Run the layers over the pairs that wait."""

    def start(
        self, target: Target, chunk: int | None, layers: int, width: int, dtype: torch.dtype
    ) -> None:
        """layers: of the cache. width: F of the features. dtype: theirs."""
        self.target, self.chunk, self.vocab_size = target, chunk, target.vocab_size
        self.cache = TreeCache(layers=layers)
        self.nothing = torch.empty(0, width, dtype=dtype, device=target.output_device)
        self.waiting = self.none_waiting(1)

    def none_waiting(self, texts: int) -> list[Pairs]:
        """`waiting` without any pair."""
        return [Pairs(self.nothing) for _ in range(texts)]

    @property
    def lengths(self) -> list[int]:
        texts = zip(self.cache.lengths, self.waiting, strict=True)
        return [done + len(pairs) for done, pairs in texts]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for pairs, new, known in zip(self.waiting, features, tokens, strict=True):
            pairs.add(new, known[1:].to(new.device))
        fresh, waiting = max(map(len, tokens)) - 1, max(map(len, self.waiting))
        if fresh > PREFILL_AT or waiting > MOST_WAITING:
            ends = [pairs.split(len(pairs) - 1) for pairs in self.waiting]
            self.take()
            self.waiting = ends

    def rewind(self, lengths: Sequence[int]) -> None:
        cached = self.cache.lengths
        for pairs, length, done in zip(self.waiting, lengths, cached, strict=True):
            pairs.split(max(0, length - done))
        self.cache.rewind([min(pair) for pair in zip(cached, lengths, strict=True)])

    def chunk_size(self, columns: int) -> int:
        """Pairs in the next forward. columns: of the cache."""
        return self.chunk or self.target.rows_beside(columns)
