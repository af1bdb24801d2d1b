"""Chunks of new positions of several texts: how a prompt goes through a model or a head."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.model.cache import TreeCache
from treespec.trees.mask import attention_mask


@dataclass(frozen=True)
class Chunk:
    """Up to n new positions of each of B texts, as a chain. Shorter texts are padded.

    The first text has committed 2 positions and has three new ones, the second 4 and one:

        | a b . . | 0 1 2 |    position 1 of the first sees    a b 0 1        positions  2 3 4
        | p q r s | 0 . . |    position 0 of the second sees   p q r s 0                 4 . .

    columns: the chunk's place among all new positions.
    lengths: committed positions of each text.
    taken: positions of the chunk that each text has; the others are padding.
    """

    columns: slice
    lengths: list[int]
    taken: list[int]
    depth: Tensor  # [B, n] int64: 0, 1, 2, …
    causal: Tensor  # [B, n, n] bool

    @property
    def positions(self) -> Tensor:
        """[B, n] int64: the position in its text of each new token."""
        return torch.tensor(self.lengths, device=self.depth.device)[:, None] + self.depth

    @property
    def seen(self) -> Tensor:
        """[B, n, T] bool: the columns of cache and chunk that each new position sees."""
        return attention_mask(self.causal, self.depth, self.lengths)


def causal_chunks(
    cache: TreeCache,
    counts: Sequence[int],
    size: Callable[[int], int],
    device: torch.device | None = None,
) -> Iterator[Chunk]:
    """Yield chunks for the caller to forward. The cache commits each chunk before the next.

    counts: new positions of each text.
    size: (columns of the cache) -> the largest number of positions in the next chunk.
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
