"""Drafts with a cached model, a level of nodes at a time, in the cache columns after the sequences."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.drafter import Frontier, Frontiers, Proposer, pad_frontiers
from treespec.model.cache import TreeCache
from treespec.model.masks import gather_rows, unpad_rows
from treespec.model.target import Target
from treespec.trees.tree import build_range, cache_tensor, to_device


@final
class Levels:
    """The columns that the drafted levels of one cycle see. The levels follow one another in the cache:

        | sequences | level 1 | level 2 | ...

    A node sees the columns that its parent saw, and its own. None of the levels is committed. Sequences with fewer
    frontier nodes are padded with nodes that no other node sees. Level 1 is a b, level 2 is c d e; c and d are
    below a, e below b:

        columns    a b | c d e
        c          x . | x . .
        d          x . | . x .
        e          . x | . . x

    Attributes:
        seen: [B, F, U] bool, the columns that each frontier node sees: U columns of the levels, or of the sequences
            and the levels.
        columns: the columns still to be written, if `seen` spans all columns from the start (`cuda_graphs`);
            None: `seen` grows with each level.
    """

    def __init__(self, seen: Tensor, columns: Tensor | None = None) -> None:
        self.seen = seen
        self.columns = columns

    def extend(self, above: Tensor) -> None:
        """Adds the next level. above: [B, F] the row of each node's parent in the level before."""
        b, n = above.shape
        identity = cache_tensor(torch.eye, n, dtype=torch.bool, device=above.device)
        itself = identity.expand(b, n, n)
        seen = gather_rows(self.seen, above)
        if self.columns is None:
            self.seen = torch.cat([seen, itself], dim=2)
        else:
            self.seen = seen.index_copy(2, self.columns[:n], itself)
            self.columns = self.columns[n:]


class BranchProposer(Proposer):
    """Drafts levels with a language model, in the columns after the sequences of a cache (`follow`)."""

    model: Target

    def follow(self, cache: TreeCache) -> None:
        """Starts drafting after the B sequences of a cache."""
        device = self.model.output_device
        lengths = cache.lengths
        self.written = cache
        self.places = build_range(cache.end, device).expand(len(lengths), -1)
        self.branch = Levels(torch.ones(len(lengths), 1, 0, dtype=torch.bool, device=device))
        self.after = to_device(lengths, device)[:, None]  # [B, 1] next level's position

    def extend_roots(self, roots: Tensor) -> list[Tensor | None]:
        """Drafts the roots' children: `extend` for the first level. roots: [B] int64, on the host."""
        root_tokens = to_device(roots, self.places.device).split(1)
        frontiers = [Frontier(root, torch.zeros_like(root)) for root in root_tokens]
        return list(self.extend(frontiers))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        tokens, above, sizes = pad_frontiers(frontiers, self.places.device)
        self.branch.extend(above)
        self.places = torch.cat([self.places, self.after.expand(tokens.shape)], dim=1)
        self.after = self.after + 1
        hidden = self.model.forward_nodes(self.written, tokens, self.places, self.branch.seen)
        return list(self.model.compute_output_logits(unpad_rows(hidden, sizes)).split(sizes))
