"""The order of training: a function of the seed and the epoch, so that a run can resume at any step.

Conversations of similar lengths form a batch, and each batch is divided among the processes. Five
conversations, batches of two, two processes (an epoch leaves out the rest, here conversation 2):

    length           1   2     3   4     5
    conversation     1   3     0   4     2
    process          p0  p1    p0  p1
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
    """A process's part of a batch.

    Attributes:
        batch: the number of the batch in the run, from 0.
        conversations: the numbers of the conversations.
    """

    batch: int
    conversations: list[int]


def split_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Split an epoch into batches of examples with similar lengths, in random order. Unfilled batches are dropped.

    With fewer examples than `batch_size`, one batch has all of them.

    Args:
        lengths: the number of tokens of each example.
        batch_size: examples in a batch, for all processes together.
        seed: the run's seed.
        epoch: the number of the epoch; each has another order.

    Returns:
        For each batch the numbers of its examples.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(lengths), generator=generator, device="cpu").tolist()
    batches = []
    for start in range(0, len(order), POOL_BATCHES * batch_size):
        pool = sorted(
            order[start : start + POOL_BATCHES * batch_size], key=lambda i: (lengths[i], i)
        )
        full = range(0, len(pool) - batch_size + 1, batch_size)
        batches += [pool[i : i + batch_size] for i in full]
    if not batches:
        batches = [order]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator, device="cpu")]


def iterate_forwards(
    first: int, batches_of: Callable[[int], list[list[int]]], process: int, processes: int
) -> Iterator[Forward]:
    """Yield the forwards of a process from batch `first` of the run on, without end.

    Args:
        first: the number of the first batch, counted from the start of the run.
        batches_of: (epoch) -> its batches; all epochs have the same number of batches.
        process: the number of this process.
        processes: the number of processes.
    """
    per_epoch = len(batches_of(0))
    for epoch in count(first // per_epoch):
        for number, batch in enumerate(batches_of(epoch), epoch * per_epoch):
            if number < first:
                continue
            conversations = batch[process::processes]
            if not conversations:  # fewer conversations than processes: each gets them all
                conversations = batch
            yield Forward(number, conversations)


def read_ahead(
    coming: Iterator[Forward], read: Callable[[list[int]], Tensor]
) -> Iterator[tuple[Forward, Tensor]]:
    """Yield endless forwards with their features; meanwhile a thread reads the next forward's features."""

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
    """Stack rows into [B, T, ...], padded with zeros on the right, which causal attention does not see."""
    return pad_sequence(list(rows), batch_first=True)
