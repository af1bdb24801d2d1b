"""Pairs (feature, following token) of the sequence, which the layers of a draft model take.

EAGLE's heads, block heads and MTP layers read a sequence as pairs. Five tokens, of which e is the root:

    token      a    b    c    d    e
    feature    f0   f1   f2   f3   .
    pairs      f0,b f1,c f2,d f3,e
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treespec.draft.drafter import PREFILL_AT, Frontier, Proposer, aligned
from treespec.model.cache import TreeCache
from treespec.model.cuda_graphs import Graphs
from treespec.model.masks import Chunk, causal_chunks, together, unpadded
from treespec.model.target import Target
from treespec.trees.tree import sent


class PairProposer(Proposer):
    """Drafts with a head's layers, which take pairs and keep keys and values of them.

    Observed pairs wait until `begin` runs the layers over them. Of a prompt only the last pair
    waits. waiting: by sequence, features [n, F] and the tokens after them [n].
    """

    head: Any  # of the class that the proposer is for
    per_text: tuple[str, ...] = ("waiting", "cache")

    def __init__(self, head: Any, target: Target) -> None:
        self.head = head
        self.target = target
        self.vocab_size = target.vocab_size
        self.cache = TreeCache(head.cached_layers)
        self.graphs = Graphs(type(head).__name__) if target.graphs else None
        nothing = torch.empty(0, head.feature_size, dtype=target.dtype, device=target.output_device)
        self.nothing = nothing, nothing.new_empty(0, dtype=torch.int64)
        self.waiting = [self.nothing]

    def pairs(self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None) -> Tensor:
        """Run the layers over new pairs. Returns their states [B, n, H]; without layers the features.

        features: [B, n, F]. tokens: [B, n]. roots: [B] with the last chunk of `begin`, else None.
        """
        return features

    @abstractmethod
    def first(self, last: Tensor, roots: Tensor) -> Tensor:
        """[B, 1, N] draft logits for the children of the roots [B].

        last: [B, H] the states of the sequences' last pairs.
        """

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        if not any(len(tokens) for _, tokens in self.waiting):
            return [None] * len(self.waiting)
        roots = sent(roots, self.target.output_device)
        logits = self.first(self.run(roots), roots)
        return [row if n else None for row, n in zip(logits, self.cache.lengths, strict=True)]

    @torch.no_grad()
    def run(self, roots: Tensor | None = None) -> Tensor:
        """Run the layers over the waiting pairs; drafted levels are forgotten.

        Returns [B, H] the states of the sequences' last pairs.
        """
        self.cache.rewind(self.cache.lengths)
        features, tokens = (together(rows) for rows in zip(*self.waiting, strict=True))
        last: list[Tensor] = []
        counts = [len(row) for _, row in self.waiting]
        for chunk in causal_chunks(self.cache, counts, self.target.rows_beside, tokens.device):
            ends = roots if chunk.columns.stop >= max(counts) else None
            states = self.pairs(chunk, features[:, chunk.columns], tokens[:, chunk.columns], ends)
            rows = zip(states, last or states[:, 0], chunk.taken, strict=True)
            last = [new[taken - 1] if taken else old for new, old, taken in rows]
        self.waiting = [self.nothing] * len(counts)
        return torch.stack(last) if len(last) > 1 else last[0][None]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, (new, known) in enumerate(zip(features, tokens, strict=True)):
            (states, following) = self.waiting[row]
            after = sent(known[1:], new.device)
            if len(following):
                new = torch.cat([states, new])
                after = torch.cat([following, after])
            self.waiting[row] = new, after
        if max(len(known) for _, known in self.waiting) > PREFILL_AT:
            ends = [(states[-1:], known[-1:]) for states, known in self.waiting]
            self.waiting = [(states[:-1], known[:-1]) for states, known in self.waiting]
            self.run()
            self.waiting = ends

    def rewind(self, lengths: Sequence[int]) -> None:
        cached = self.cache.lengths
        kept = [max(0, length - done) for length, done in zip(lengths, cached, strict=True)]
        self.waiting = [(f[:n], t[:n]) for (f, t), n in zip(self.waiting, kept, strict=True)]
        self.cache.rewind([min(pair) for pair in zip(cached, lengths, strict=True)])


class DeepeningProposer(PairProposer):
    """Drafts a level from states of the level above."""

    @abstractmethod
    def deeper(self, tokens: Tensor, above: Tensor) -> Tensor:
        """[B, F, H] states at the frontiers.

        tokens: [B, F] the target's, padded. above: [B, F] the row of each node's parent.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """[..., N] draft logits of states [..., H] of this level."""

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = aligned(frontiers, self.target.output_device)
        drafted = self.vocabulary
        tokens = tokens if drafted is None else drafted[tokens]
        states = unpadded(self.deeper(tokens, above), sizes)
        return list(self.logits(states).split(sizes))


class AtOnceProposer(PairProposer):
    """Drafts all levels from the sequence alone."""

    at_once = True
    level = 0
    draft_logits: Tensor  # [B, D, N] of all levels of this cycle

    @abstractmethod
    def all_levels(self, last: Tensor) -> Tensor:
        """[B, D, N] draft logits of all levels. last: [B, H] the states of the last pairs."""

    def first(self, last: Tensor, roots: Tensor) -> Tensor:
        self.level, self.draft_logits = 0, self.all_levels(last)
        return self.draft_logits[:, :1]

    def levels(self, row: int) -> Tensor:
        return self.draft_logits[row]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        self.level += 1
        sizes = [len(frontier.tokens) if frontier else 0 for frontier in frontiers]
        rows = self.draft_logits[:, self.level, None]
        return [row.expand(size, -1) for row, size in zip(rows, sizes, strict=True)]
