"""The order of training: a function of the seed and the epoch, so that a run resumes anywhere."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

T = TypeVar("T")

POOL = 64  # batches sorted by length together: less than 5 % is padding


def epoch_batches(
    lengths: Sequence[int], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Batches of examples with similar lengths, in random order, without an unfilled last one.

    With fewer examples than batch_size, one batch holds them all.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(order[start : start + POOL * batch_size], key=lambda i: (lengths[i], i))
        full = range(0, len(pool) - batch_size + 1, batch_size)
        batches += [pool[i : i + batch_size] for i in full]
    batches = batches or [order]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


def padding(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of positions in batches that are padding."""
    filled = sum(lengths[i] for batch in batches for i in batch)
    positions = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1 - filled / positions


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[B, T, ...] rows, padded with zeros on the right, where causal attention does not look."""
    return pad_sequence(list(rows), batch_first=True)


def batches_from(
    number: int, lengths: list[int], batch_size: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(number, batch) from batch `number` of the run on, epoch after epoch."""
    while True:
        per_epoch = len(epoch_batches(lengths, batch_size, seed, 0))
        epoch, place = divmod(number, per_epoch)
        for batch in epoch_batches(lengths, batch_size, seed, epoch)[place:]:
            yield number, batch
            number += 1


def read_ahead(batches: Iterator[T], expect: Callable[[T], None]) -> Iterator[T]:
    """The same endless batches. `expect` hears of each while the one before it is in use."""
    waiting = next(batches)
    for following in batches:
        expect(following)
        yield waiting
        waiting = following
