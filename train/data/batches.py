"""The order of training: a function of the seed and the epoch, so that a run resumes anywhere.

Each batch is divided among the processes. Two batches a step, two processes:

    batch       0         1
    process     p0  p1    p0  p1
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespec.kernels.workers import end_workers

POOL_BATCHES = 64  # batches sorted by length together: less than 5 % is padding


class Forward(NamedTuple):
    """conversations: a process's part of batch `batch`, counted from the start of the run."""

    batch: int
    conversations: list[int]


def split_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of examples with similar lengths, in random order, without an unfilled last one.

    With fewer examples than batch_size, one batch holds them all.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), POOL_BATCHES * batch_size):
        pool = sorted(
            order[start : start + POOL_BATCHES * batch_size], key=lambda i: (lengths[i], i)
        )
        full = range(0, len(pool) - batch_size + 1, batch_size)
        batches += [pool[i : i + batch_size] for i in full]
    if not batches:
        batches = [order]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


def iterate_forwards(
    first: int, batches_of: Callable[[int], list[list[int]]], process: int, processes: int
) -> Iterator[Forward]:
    """The forwards of a process from batch `first` of the run on, without an end.

    batches_of: the batches of an epoch; all epochs have the same number.
    """
    per_epoch = len(batches_of(0))
    for epoch in count(first // per_epoch):
        for number, batch in enumerate(batches_of(epoch), epoch * per_epoch):
            if number < first:
                continue
            own = batch[process::processes]
            if not own:  # fewer conversations than processes: each takes them all
                own = batch
            yield Forward(number, own)


def read_ahead(
    coming: Iterator[Forward], read: Callable[[list[int]], Tensor]
) -> Iterator[tuple[Forward, Tensor]]:
    """Endless forwards with their features; a thread reads those of the next one meanwhile."""

    def read_in_thread(conversations: list[int]) -> Tensor:
        try:
            return read(conversations)
        finally:
            end_workers()

    with ThreadPoolExecutor(1, "features") as reader:
        previous: tuple[Forward, Future[Tensor]] | None = None
        for forward in coming:
            pending = reader.submit(read_in_thread, forward.conversations)
            if previous is not None:
                earlier, features = previous
                yield earlier, features.result()
            previous = (forward, pending)


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """[B, T, ...] rows, padded with zeros on the right, where causal attention does not look."""
    return pad_sequence(list(rows), batch_first=True)
