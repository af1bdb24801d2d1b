"""Trained heads as proposers.

EAGLE's heads extrapolate features; their cache keeps the target's features of accepted tokens, and
forgets those that the head drafted. Medusa's and Hydra's take a hidden state of each sequence's last
position: Medusa's logits of a level are the same at all its nodes, Hydra's depend on the tokens of a
path. Block heads draft all levels of a cycle's trees in one forward.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.models.branch import Levels
from treespec.draft.trained.pairs import AtOnceProposer, DeepeningProposer
from treespec.heads.eagle import FeatureHead
from treespec.heads.hydra import HydraHead
from treespec.heads.llama import BlockHead, Pairs
from treespec.heads.medusa import MedusaHead
from treespec.model.masks import Chunk, rows_of
from treespec.trees.mask import committed, positions


@final
class EagleProposer(DeepeningProposer):
    """Drafts with a head and the target's output path; one sequence at first.

    Levels of the trees are written after the pairs in the head's own cache, one row a sequence, and
    forgotten by the next `begin`:

        | observed pairs | level 1 | level 2 | ...

    Sequences with fewer pairs or frontier nodes are padded with ones that no node sees.
    """

    head: FeatureHead
    positions: Tensor  # [B, 1] positions of the last level's features
    frontier: Tensor  # [B, F, H] features extrapolated at the frontiers
    drafted: Levels

    @property
    def cached_layers(self) -> int:
        return len(self.head.attentions)

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        self.frontier = last[0][:, None]
        device = self.frontier.device
        self.drafted = Levels(committed(self.cache.lengths, device))
        self.positions = torch.tensor(self.cache.lengths, device=device)[:, None] - 1
        return self.logits(self.frontier)

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        return [self._forward(tokens, self.head.fuse(features), chunk.positions, chunk.seen)]

    def deeper(self, tokens: Tensor, above: Tensor) -> Tensor:
        self.drafted.extend(above)
        self.positions = self.positions + 1
        features = rows_of(self.frontier, above)
        self.frontier = self._forward(tokens, features, self.positions, self.drafted.seen)
        return self.frontier

    def logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states, self.target)

    def steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """From position t: true pairs up to t, then its own features with the sequence's tokens."""
        fused = self.head.fuse(features[None, :-2].to(self.head.dtype))
        for hidden in self.head.unrolled(tokens[None], fused, steps):
            yield self.logits(hidden[0, : len(tokens) - steps - 1].to(features.dtype))

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """One step of the head; its keys and values stay in the cache. Returns [B, T, H].

        tokens: [B, T]. features: [B, T, H]. positions: [B, T or 1]. mask: [B, T, P + T].
        """
        layers = self.cache.tree_layers
        hidden = self.head.step(tokens, features, positions, mask[:, None], layers)
        for layer in layers:
            layer.length += tokens.shape[1]
        return hidden


@final
class MedusaProposer(AtOnceProposer):
    """Drafts from the last hidden state of each sequence."""

    head: MedusaHead
    states: Tensor  # [B, H]

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        return [features]

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        (self.states,) = last
        return super().first(last, roots)

    def at(self, level: int) -> Tensor:
        return self.head.step(level, self.states)

    def steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Step d is head d - 1, applied to the same states."""
        states = features[: len(tokens) - steps - 1].to(self.head.dtype)
        return (self.head.step(i, states) for i in range(steps))


@final
class HydraProposer(DeepeningProposer):
    """Drafts with heads and the target's embeddings.

    Hydra++'s prefix layer attends over the hidden states up to a position; its cache is the layer's.
    """

    head: HydraHead
    # [B, F, (level + 2) H] the state, and the embeddings along the path to each frontier node.
    inputs: Tensor
    level = 0

    @property
    def cached_layers(self) -> int:
        return self.head.cached_layers

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        for layer in self.cache.tree_layers:
            features = self.head.states(features, chunk.positions, chunk.seen[:, None], layer)
            layer.length += features.shape[1]
        return [features]

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        (states,), self.level = last, 0
        self.inputs = torch.cat([states, self._embedded(roots, states)], dim=-1)[:, None]
        return self.logits(self.inputs)

    def deeper(self, tokens: Tensor, above: Tensor) -> Tensor:
        embedded = self._embedded(tokens, self.inputs)
        self.inputs = torch.cat([rows_of(self.inputs, above), embedded], dim=-1)
        self.level += 1
        return self.inputs

    def logits(self, states: Tensor) -> Tensor:
        return self.head.step(self.level, states)

    def steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Step d is head d - 1, given the sequence's own tokens."""
        rows = len(tokens) - steps - 1
        known = features[None, :rows].to(self.head.dtype)
        counts = torch.ones(steps, 1, rows, dtype=torch.bool, device=known.device)
        states = self.head(known, self._embedded(tokens[None, 1:], known), counts)
        return (layer(one) for layer, one in zip(self.head.output_layers, states, strict=False))

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.target.embeddings(tokens).to(like.dtype)


@final
class BlockProposer(AtOnceProposer):
    """Drafts with a block head and the target's output path; one sequence at first.

    `begin` runs the head over the waiting pairs together with the block, which is after them in
    the same forward and is then forgotten.
    """

    head: BlockHead
    draft_logits: Tensor  # [B, D, N] draft logits of all levels
    block: Tensor  # [B, S, H] states of the block

    @property
    def cached_layers(self) -> int:
        return self.head.layer_count

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        self.draft_logits = self.head.logits(self.drafted(last), self.target)
        return super().first(last, roots)

    def at(self, level: int) -> Tensor:
        return self.draft_logits[:, level]

    def steps(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Step d is level d of the block below each position in turn."""
        proposer, states = self.new(), []
        for row in range(len(tokens) - steps - 1):
            proposer.observe([features[row : row + 1]], [tokens[row : row + 2]])
            states.append(proposer.drafted(proposer.run(tokens[row + 1 : row + 2]))[0])
        levels = torch.stack(states, dim=1)  # [D, R, H]
        return (self.head.logits(levels[level], self.target) for level in range(steps))

    def drafted(self, last: list[Tensor]) -> Tensor:
        """[B, D, H] the states of all levels, after `run` with roots, which gave `last`."""
        return self.head.drafted(last[0] if last else None, self.block)

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        """The block stands after the last chunk."""
        below = None if roots is None else roots.to(self.target.output_device)
        places, seen = self._beside(chunk, 0 if below is None else self.head.block)
        new = Pairs(tokens, features.to(self.head.dtype), places, seen)
        own, self.block = self.head.run(new, below, self.cache.tree_layers, self.target.embeddings)
        return [] if own is None else [own]

    def _beside(self, chunk: Chunk, size: int) -> tuple[Tensor, Tensor]:
        """Positions [B, T] of all columns, and what the rows see, [B, n + S, T], with a block of S.

        A sequence of two cached pairs and one of three new ones, and a block of two:

            columns      | a b | 0 1 2 | S S |
            pair 0       | x x | x . . | . . |      positions 0 1 2 3 4, the block's 3 4
            the block    | x x | x . . | x x |
        """
        n, device = chunk.depth.shape[1], chunk.depth.device
        lengths, taken = (torch.tensor(x, device=device) for x in (chunk.lengths, chunk.taken))
        block = torch.arange(size, device=device)
        places = positions(chunk.depth, chunk.lengths)
        places = torch.cat([places, (lengths + taken)[:, None] + block], dim=1)
        cached = chunk.seen[:, :1, :-n].expand(-1, size, -1)
        new = (torch.arange(n, device=device) < taken[:, None])[:, None].expand(-1, size, -1)
        itself = new.new_ones(len(places), size, size)
        rows = torch.cat([cached, new, itself], dim=2)
        return places, torch.cat([pad(chunk.seen, (0, size)), rows], dim=1)
