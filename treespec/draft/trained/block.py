"""Block heads as proposers: one forward of the head drafts all levels of a cycle's trees."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.proposer import Frontier
from treespec.draft.trained.pairs import PairProposer
from treespec.heads.block import BlockHead, Pairs
from treespec.model.cache import TreeCache
from treespec.model.chunks import Chunk, causal_chunks
from treespec.model.masks import together
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
        self.laws: list[Tensor | None] = [None]  # [D, N] draft logits of all levels, by text
        self.level = 0

    def levels(self, row: int) -> Tensor:
        laws = self.laws[row]
        assert laws is not None
        return laws

    def new(self) -> "BlockProposer":
        return BlockProposer(self.head, self.target, self.chunk)

    def take(self) -> None:
        self.states(None)

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.level, self.laws = 0, [None] * len(self.waiting)
        if not any(map(len, self.waiting)):
            return list(self.laws)
        states = self.states(roots)
        assert states is not None
        logits = self.head.logits(states, self.target)  # [B, D, N]
        for row, length in enumerate(self.cache.lengths):
            self.laws[row] = logits[row] if length else None
        return [None if laws is None else laws[:1] for laws in self.laws]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        self.level += 1
        below = []
        width = next(laws.shape[1] for laws in self.laws if laws is not None)
        for laws, frontier in zip(self.laws, frontiers, strict=True):
            if laws is None or frontier is None:
                below.append(torch.empty(0, width, device=self.target.output_device))
            else:
                below.append(laws[self.level].expand(len(frontier.tokens), -1))
        return below

    def states(self, roots: Tensor | None) -> Tensor | None:
        """Run the head over the pairs that wait, and over a block unless `roots` [B] is None.

        Returns the states of all levels, [B, D, H], or None without a block.
        """
        self.cache.rewind(self.cache.lengths)
        counts = [len(pairs) for pairs in self.waiting]
        pairs = [pairs.joined() for pairs in self.waiting]
        device, states = self.target.output_device, None
        last = [torch.empty(0)] * len(counts)  # [H] at each text's last pair
        for chunk in causal_chunks(self.cache, counts, self.chunk_size, device):
            # 1. The block stands behind the last chunk.
            ends = chunk.columns.stop < max(counts)
            below = None if roots is None or ends else roots.to(device)
            places, seen = self._beside(chunk, 0 if below is None else self.head.block)

            # 2. One forward.
            features = together([f[chunk.columns] for f, _ in pairs])  # [B, n, F]
            tokens = together([t[chunk.columns] for _, t in pairs])  # [B, n]
            new = Pairs(tokens, features.to(self.head.dtype), places, seen)
            own, block = self.head.run(new, below, self.cache.tree_layers, self.target.embeddings)

            # 3. The states that levels are drafted from.
            if own is not None:
                for row, taken in enumerate(chunk.taken):
                    if taken or not chunk.columns.start:
                        last[row] = own[row, taken - 1]
            if below is not None:
                states = self.head.drafted(None if own is None else torch.stack(last), block)
        self.waiting = self.none_waiting(len(counts))
        return states

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
