"""Drafted nodes behind the texts of a cache, a level at a time: what drafts by a language model have in common."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.proposer import Frontier
from treespec.model.masks import rows_of, together, unpadded
from treespec.target import Target
from treespec.trees.mask import committed


@final
class Branch:
    """Of one cycle. Levels stand one behind another, and nothing of them is committed:

        | texts | level 1 | level 2 | ...

    Texts that have fewer frontier nodes are filled up with ones that nothing sees.
    """

    def __init__(self, model: Target, cache: TreeCache, lengths: Sequence[int], places: Tensor | None = None) -> None:
        """lengths: of the B texts. places: [B, T] where the token of each column of the cache stands in its text.

        -1 is a column that holds nothing of it. None is the columns' own numbers, as far as is committed.
        """
        device = model.output_device
        if places is None:
            held = committed(cache.lengths, device)[:, 0]
            places = torch.where(held, torch.arange(cache.end, device=device), -1)
        self.model, self.cache, self.places = model, cache, places
        self.seen = places[:, None] >= 0  # [B, F, T] by the frontiers
        self.after = torch.tensor(lengths, device=device)[:, None]  # [B, 1] position of the next level

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """Of each text [F, V] logits of the model below its frontier, [0, V] where it has none."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.seen.device)
        tokens = together([f.tokens if f else nothing for f in frontiers])  # [B, F]
        above = together([f.parent_rows if f else nothing for f in frontiers])
        b, n = tokens.shape
        own = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(b, n, n)
        self.seen = torch.cat([rows_of(self.seen, above), own], dim=2)
        self.places = torch.cat([self.places, self.after.expand(b, n)], dim=1)
        self.after = self.after + 1
        hidden = self.model.forward_nodes(self.cache, tokens, self.places, self.seen)
        sizes = [len(f.tokens) if f else 0 for f in frontiers]
        return list(self.model.output_logits(unpadded(hidden, sizes)).split(sizes))


def root_frontiers(roots: Tensor) -> list[Frontier]:
    """The root of each text, below nothing, as a first level. roots: [B] int64."""
    return [Frontier(root, torch.zeros_like(root)) for root in roots.split(1)]
