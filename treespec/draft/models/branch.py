"""Drafting by layers with a cache, a level of nodes at a time, behind the sequences of the cache."""

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
        own = cache_tensor(torch.eye, n, dtype=torch.bool, device=above.device).expand(b, n, n)
        seen = gather_rows(self.seen, above)
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
        self.places = build_range(cache.end, device).expand(len(lengths), -1)
        self.branch = Levels(torch.ones(len(lengths), 1, 0, dtype=torch.bool, device=device))
        self.after = to_device(lengths, device)[:, None]  # [B, 1] next level's position

    def extend_roots(self, roots: Tensor) -> list[Tensor | None]:
        """`extend` for the roots [B] int64 on the host, which have no level above."""
        each = to_device(roots, self.places.device).split(1)
        frontiers = [Frontier(root, torch.zeros_like(root)) for root in each]
        return list(self.extend(frontiers))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        tokens, above, sizes = pad_frontiers(frontiers, self.places.device)
        self.branch.extend(above)
        self.places = torch.cat([self.places, self.after.expand(tokens.shape)], dim=1)
        self.after = self.after + 1
        hidden = self.model.forward_nodes(self.written, tokens, self.places, self.branch.seen)
        return list(self.model.compute_output_logits(unpad_rows(hidden, sizes)).split(sizes))
