"""Block heads as proposers: one forward of the head drafts all levels of a cycle's trees."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.proposer import Frontier
from treespec.draft.trained.pairs import PairProposer
from treespec.heads.block import BlockHead, Pairs
from treespec.model.chunks import Chunk
from treespec.model.target import Target
from treespec.trees.mask import positions


@final
class BlockProposer(PairProposer):
    """Drafts with a block head and the target's output path; one text at first.

    `begin` runs the head over the waiting pairs together with the block, which is behind them in
    the same forward and is then forgotten.
    """

    head: BlockHead
    at_once = True

    def __init__(self, head: BlockHead, target: Target, chunk: int | None = None) -> None:
        """chunk: pairs per forward of the head. Default: the target's chunk size."""
        self.head = head
        self.start(target, chunk, head.layer_count, head.feature_size, head.dtype)
        self.laws = torch.empty(0)  # [B, D, N] draft logits of all levels
        self.block = torch.empty(0)  # [B, S, H] states of the block
        self.level = 0

    def levels(self, row: int) -> Tensor:
        return self.laws[row]

    def new(self) -> "BlockProposer":
        return BlockProposer(self.head, self.target, self.chunk)

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        self.level, self.laws = 0, self.head.logits(self.drafted(last), self.target)
        return self.laws[:, :1]

    def drafted(self, last: list[Tensor]) -> Tensor:
        """[B, D, H] the states of all levels, after `run` with roots, which gave `last`."""
        return self.head.drafted(last[0] if last else None, self.block)

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        self.level += 1
        rows = zip(self.laws[:, self.level], frontiers, strict=True)
        return [law.expand(len(frontier.tokens) if frontier else 0, -1) for law, frontier in rows]

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        """The block stands behind the last chunk."""
        below = None if roots is None else roots.to(self.target.output_device)
        places, seen = self._beside(chunk, 0 if below is None else self.head.block)
        new = Pairs(tokens, features.to(self.head.dtype), places, seen)
        own, self.block = self.head.run(new, below, self.cache.tree_layers, self.target.embeddings)
        return [] if own is None else [own]

    def _beside(self, chunk: Chunk, size: int) -> tuple[Tensor, Tensor]:
        """Positions [B, T] of all columns, and what the rows see, [B, n + S, T], with a block of S.

        A text of two cached pairs and one of three new ones, and a block of two:

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
