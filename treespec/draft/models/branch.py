"""Drafting by layers with a cache, a level of nodes at a time, behind the sequences of the cache."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.drafter import Frontier, Frontiers, Proposer, aligned
from treespec.model.cache import TreeCache
from treespec.model.masks import rows_of, unpadded
from treespec.model.target import Target
from treespec.trees.tree import columns, made, sent


@final
class Levels:
    """The drafted levels of one cycle, one behind another in the cache; none is committed:

        | sequences | level 1 | level 2 | ...

    A node sees what its parent saw, and itself. Sequences with fewer frontier nodes are padded with
    nodes that no other node sees. seen: [B, F, U] bool, the columns that each frontier node sees: of
    the levels, or of the sequences too. columns: of the levels, where `seen` has all of them (`cuda_graphs`).
    """

    def __init__(self, seen: Tensor, columns: Tensor | None = None) -> None:
        self.seen = seen
        self.columns = columns

    def extend(self, above: Tensor) -> None:
        """The next level. above: [B, F] rows of the parents."""
        b, n = above.shape
        own = made(torch.eye, n, dtype=torch.bool, device=above.device).expand(b, n, n)
        seen = rows_of(self.seen, above)
        if self.columns is None:
            self.seen = torch.cat([seen, own], dim=2)
        else:
            self.seen = seen.index_copy(2, self.columns[:n], own)
            self.columns = self.columns[n:]


class BranchProposer(Proposer):
    """Drafts levels with a language model, behind the sequences of a cache (`follow`)."""

    model: Target

    def follow(self, cache: TreeCache) -> None:
        """Draft behind the B sequences of a cache."""
        device = self.model.output_device
        lengths = cache.lengths
        self.written = cache
        self.places = columns(cache.end, device).expand(len(lengths), -1)
        self.branch = Levels(torch.ones(len(lengths), 1, 0, dtype=torch.bool, device=device))
        self.after = sent(lengths, device)[:, None]  # [B, 1] next level's position

    def below(self, roots: Tensor) -> list[Tensor | None]:
        """`extend` for the roots [B] int64 on the host, which have no level above."""
        each = sent(roots, self.places.device).split(1)
        frontiers = [Frontier(root, torch.zeros_like(root)) for root in each]
        return list(self.extend(frontiers))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        tokens, above, sizes = aligned(frontiers, self.places.device)
        self.branch.extend(above)
        self.places = torch.cat([self.places, self.after.expand(tokens.shape)], dim=1)
        self.after = self.after + 1
        hidden = self.model.forward_nodes(self.written, tokens, self.places, self.branch.seen)
        return list(self.model.output_logits(unpadded(hidden, sizes)).split(sizes))
