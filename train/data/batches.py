"""The order of training: a function of the seed and the epoch, so that a run resumes anywhere.

A run that began with G processes divides each batch into G groups, one a forward. Later it may go
on with another number of processes, which share the same forwards. Two batches a step, G = 2:

    batch, group        0,0  0,1  1,0  1,1
    of 2 processes      p0   p1   p0   p1
    of 1 process        p0   p0   p0   p0
    of 4 processes      p0   p1   p2   p3

Order, noise and groups stay the same, so the gradient does, but for the order of its sum.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

POOL = 64  # batches sorted by length together: less than 5 % is padding


class Forward(NamedTuple):
    """conversations: of group `group` in batch `batch`, counted from the start of the run."""

    batch: int
    group: int
    conversations: list[int]


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


def forwards(
    number: int, lengths: Sequence[int], batch_size: int, seed: int, groups: int
) -> Iterator[Forward]:
    """All forwards from batch `number` of the run on, epoch after epoch. batch_size: of all groups."""
    while True:
        batches = epoch_batches(lengths, batch_size, seed, 0)
        epoch, position = divmod(number, len(batches))
        for batch in epoch_batches(lengths, batch_size, seed, epoch)[position:]:
            for group in range(groups):
                yield Forward(number, group, batch[group::groups] or batch)
            number += 1


def read_ahead(
    coming: Iterator[Forward], read: Callable[[Forward], Tensor]
) -> Iterator[tuple[Forward, Tensor]]:
    """Endless forwards with their features; a thread reads those of the next one meanwhile."""
    with ThreadPoolExecutor(1, "features") as reader:
        forward = next(coming)
        waiting = reader.submit(read, forward)
        for following in coming:
            features, waiting = waiting, reader.submit(read, following)
            yield forward, features.result()
            forward = following


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[B, T, ...] rows, padded with zeros on the right, where causal attention does not look."""
    return pad_sequence(list(rows), batch_first=True)
