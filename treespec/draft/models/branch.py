"""Drafting by a language model, a level of nodes at a time, behind the texts of its cache."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.proposer import Frontier, aligned
from treespec.model.cache import TreeCache
from treespec.model.masks import rows_of, unpadded
from treespec.model.target import Target
from treespec.trees.mask import committed


@final
class Branch:
    """The drafted levels of one cycle, one behind another in the cache; none is committed:

        | texts | level 1 | level 2 | ...

    Texts with fewer frontier nodes are padded with nodes that no other node sees.
    """

    def __init__(
        self, model: Target, cache: TreeCache, lengths: Sequence[int], places: Tensor | None = None
    ) -> None:
        """lengths: of the B texts. places: [B, T] the position in its text of each column's token.

        -1 marks an empty column. Default: committed column i holds position i.
        """
        device = model.output_device
        if places is None:
            held = committed(cache.lengths, device)[:, 0]
            places = torch.where(held, torch.arange(cache.end, device=device), -1)
        self.model, self.cache, self.places = model, cache, places
        self.seen = places[:, None] >= 0  # [B, F, T] columns that each frontier node sees
        self.after = torch.tensor(lengths, device=device)[:, None]  # [B, 1] next level's position

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """For each text [F, V] logits for the children of its frontier; [0, V] without one."""
        tokens, above, sizes = aligned(frontiers, self.seen.device)
        b, n = tokens.shape
        own = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(b, n, n)
        self.seen = torch.cat([rows_of(self.seen, above), own], dim=2)
        self.places = torch.cat([self.places, self.after.expand(b, n)], dim=1)
        self.after = self.after + 1
        hidden = self.model.forward_nodes(self.cache, tokens, self.places, self.seen)
        return list(self.model.output_logits(unpadded(hidden, sizes)).split(sizes))


def root_frontiers(roots: Tensor) -> list[Frontier]:
    """The root of each text as the first level, without a level above. roots: [B] int64."""
    return [Frontier(root, torch.zeros_like(root)) for root in roots.split(1)]
