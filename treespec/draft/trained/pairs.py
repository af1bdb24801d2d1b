"""Pairs (feature, following token) of the text, which the layers of a draft model take.

EAGLE's heads, block heads and MTP layers read a text as pairs. Five tokens, of which e is the root:

    token      a    b    c    d    e
    feature    f0   f1   f2   f3   .
    pairs      f0,b f1,c f2,d f3,e
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.proposer import PREFILL_AT, Proposer
from treespec.model.cache import TreeCache
from treespec.model.chunks import Chunk, causal_chunks
from treespec.model.masks import together
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


class PairProposer(Proposer):
    """Drafts with layers that take pairs and keep keys and values of them; one text at first.

    Observed pairs wait until `begin` runs the layers over them. Of a prompt only the last pair
    waits. A subclass calls `start` when it is made.
    """

    target: Target
    chunk: int | None  # pairs per forward; None: the target's chunk size
    cache: TreeCache
    waiting: list[Pairs]  # by text
    nothing: Tensor  # [0, F] of the features' dtype and device
    per_text: tuple[str, ...] = ("waiting", "cache")

    @abstractmethod
    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Sequence[Tensor]:
        """Run the layers over new pairs: the states [B, n, H] of each stage of the layers.

        features: [B, n, F]. tokens: [B, n]. roots: [B] with the last chunk of `begin`, else None.
        """

    @abstractmethod
    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        """[B, 1, N] draft logits for the children of the roots [B].

        last: [B, H] of each stage, at the sequences' last pairs.
        """

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

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        if not any(map(len, self.waiting)):
            return [None] * len(self.waiting)
        logits = self.first(self.run(roots), roots)
        rows = zip(logits, self.cache.lengths, strict=True)
        return [row if length else None for row, length in rows]

    @torch.no_grad()
    def run(self, roots: Tensor | None = None) -> list[Tensor]:
        """Run the layers over the waiting pairs; drafted levels are forgotten.

        Returns [B, H] of each stage, at the sequences' last pairs.
        """
        self.cache.rewind(self.cache.lengths)
        pairs = [pairs.joined() for pairs in self.waiting]
        counts, device = [len(tokens) for _, tokens in pairs], pairs[0][1].device
        last: list[list[Tensor]] = []
        for chunk in causal_chunks(self.cache, counts, self.chunk_size, device):
            features = together([features[chunk.columns] for features, _ in pairs])
            tokens = together([tokens[chunk.columns] for _, tokens in pairs])
            ends = chunk.columns.stop >= max(counts)
            stages = self.pairs(chunk, features, tokens, roots if ends else None)
            last = last or [[torch.empty(0)] * len(counts) for _ in stages]
            for rows, states in zip(last, stages, strict=True):
                for row, taken in enumerate(chunk.taken):
                    if taken or not chunk.columns.start:
                        rows[row] = states[row, taken - 1]
        self.waiting = self.none_waiting(len(counts))
        return [torch.stack(rows) for rows in last]

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
            self.run()
            self.waiting = ends

    def rewind(self, lengths: Sequence[int]) -> None:
        cached = self.cache.lengths
        for pairs, length, done in zip(self.waiting, lengths, cached, strict=True):
            pairs.split(max(0, length - done))
        self.cache.rewind([min(pair) for pair in zip(cached, lengths, strict=True)])

    def chunk_size(self, columns: int) -> int:
        """Pairs in the next forward. columns: of the cache."""
        return self.chunk or self.target.rows_beside(columns)
