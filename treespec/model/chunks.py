"""New positions of several texts, through a model in chunks: a prompt, or what a head has yet to
see.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.trees.mask import attention_mask


@dataclass(frozen=True)
class Chunk:
    """Up to n new positions of each of B texts, one behind another. Texts with fewer are padded.

    Three new positions of one text and one of the other, behind the committed ones (lengths 2 and
    4):

        | a b . . | 0 1 2 |    row 1 sees  a b 0 1          positions  2 3 4
        | p q r s | 0 . . |    row 0 sees  p q r s 0                   4 . .

    lengths: committed positions. taken: how many of the n each text has. columns: where they stand
    among the new ones.
    """

    columns: slice
    lengths: list[int]
    taken: list[int]
    depth: Tensor  # [B, n] int64: 0, 1, 2, …
    causal: Tensor  # [B, n, n] bool

    @property
    def positions(self) -> Tensor:
        """[B, n] in their texts."""
        return torch.tensor(self.lengths, device=self.depth.device)[:, None] + self.depth

    @property
    def seen(self) -> Tensor:
        """[B, n, T] bool: the columns of the cache, and of the chunk behind it, that each position
        sees.
        """
        return attention_mask(self.causal, self.depth, self.lengths)


def causal_chunks(
    cache: TreeCache,
    counts: Sequence[int],
    size: Callable[[int], int],
    device: torch.device | None = None,
) -> Iterator[Chunk]:
    """Chunks for the caller to forward, one by one; the cache commits each before the next.

    counts: new positions of each text. size: (columns of the cache) -> positions of the next chunk,
    at most.
    """
    start, texts = 0, len(counts)
    while start < max(counts):
        n = min(size(cache.end), max(counts) - start)
        taken = [max(0, min(count - start, n)) for count in counts]
        depth = torch.arange(n, device=device).expand(texts, n)
        causal = torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(texts, n, n)
        yield Chunk(slice(start, start + n), cache.lengths, taken, depth, causal)
        cache.commit([range(kept) for kept in taken])
        start += n
