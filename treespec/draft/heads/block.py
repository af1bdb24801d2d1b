"""Drafts with block heads, which compute all levels of a cycle's trees in one forward."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafter import Frontier, pad_frontiers
from treespec.draft.heads.base import AtOnceProposer, PairProposer
from treespec.heads.conditional import ConditionalBlockHead
from treespec.heads.llama import BlockHead, Pairs
from treespec.model.masks import Chunk, gather_rows, unpad_rows
from treespec.trees.tree import to_device


class BlockRunner(PairProposer):
    """Runs a block head over pairs; one sequence at first.

    `begin` runs the head over the waiting pairs and, after them in the same forward, over the block of S
    positions to draft. The block's keys and values are then dropped.

    Attributes:
        block: [B, S, H] states of the block.
    """

    head: BlockHead
    block: Tensor

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        """Runs the head over a chunk of pairs and, after the last chunk, over the block.

        Two cached pairs a b, a chunk of three columns that holds one new pair of this sequence, and a block
        of two positions. The columns 1 2 are padding:

            columns      | a b | 0 1 2 | S S |
            pair 0       | x x | x . . | . . |      positions 0 1 2 3 4, the block's 3 4
            the block    | x x | x . . | x x |
        """
        # 1. Positions [B, T] of all columns: the block's follow the sequence's last pair.
        b, n = tokens.shape
        block_size = 0
        if roots is not None:
            block_size = self.head.block
            roots = roots.to(self.target.output_device)
        device = chunk.seen.device
        taken = to_device(chunk.taken, device)[:, None]
        block_positions = chunk.positions[:, :1] + taken + torch.arange(block_size, device=device)
        positions = torch.cat([chunk.places, block_positions], dim=1)

        # 2. The columns that each row sees, [B, n + S, T]: the block sees all pairs, and itself.
        new_pairs = (torch.arange(n, device=device) < taken)[:, None]
        block_seen = torch.cat(
            [chunk.seen[:, :1, :-n], new_pairs, new_pairs.new_ones(b, 1, block_size)], dim=2
        )
        seen = torch.cat(
            [pad(chunk.seen, (0, block_size)), block_seen.expand(-1, block_size, -1)], dim=1
        )

        # 3. The forward.
        pairs = Pairs(tokens, features.to(self.head.dtype), positions, seen)
        states, self.block = self.head.run(
            pairs, roots, self.cache.tree_layers, self.target.embed_tokens
        )
        return states


@final
class BlockProposer(BlockRunner, AtOnceProposer):
    """Drafts with a block head and the target's output embedding: a level is the same below all nodes."""

    def draft_all_levels(self, last: Tensor) -> Tensor:
        return self.head.compute_logits(
            self.head.select_drafted_states(last, self.block), self.target
        )


@final
class ConditionalProposer(BlockRunner):
    """Drafts with a block head that rescores each level after the tokens of the nodes above.

    Attributes:
        level: the level that was drafted last.
        hidden: [B, D, H] the block's states of all levels of this cycle.
        level_logits: [B, D, N] their draft logits, before they are rescored.
        memory: [B, F, M] of the nodes whose children were drafted last.
        roots: [B] int64, the last tokens of the sequences.
    """

    head: ConditionalBlockHead
    level = 0
    roots: Tensor
    hidden: Tensor
    level_logits: Tensor
    memory: Tensor

    @property
    def foresees(self) -> bool:
        return True

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.level = 0
        self.roots = roots
        self.hidden = self.head.select_drafted_states(last, self.block)
        self.level_logits = self.head.project_levels(self.hidden, self.target)
        memory = self.hidden.new_zeros(len(roots), 1, self.head.memory_size)
        return self.adjust_level(roots[:, None], memory)

    @torch.no_grad()
    def compute_all_levels(self, row: int) -> Tensor:
        rows = slice(row, row + 1)
        levels = self.head.predict_levels(
            self.hidden[rows],
            self.level_logits[rows],
            self.roots[rows],
            self.target.embed_tokens,
            self.target,
        )
        return levels[0]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = pad_frontiers(frontiers, self.target.output_device)
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        self.level += 1
        logits = self.adjust_level(tokens, gather_rows(self.memory, above))
        return list(unpad_rows(logits, sizes).split(sizes))

    def adjust_level(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """Returns [B, F, N] draft logits of this level below nodes.

        tokens: [B, F] the nodes' tokens, of the target. memory: [B, F, M] of their parents.
        """
        level = self.level
        hidden = self.hidden[:, level, None].expand(-1, tokens.shape[1], -1)
        latent, self.memory = self.head.read_parents(
            hidden, tokens, memory, level, self.target.embed_tokens
        )
        return self.head.adjust_logits(self.level_logits[:, level, None], latent, self.target)
