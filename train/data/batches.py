"""The order of training: a function of the seed and the epoch, so that a run can resume at any step.

Conversations of similar lengths form a batch, and each batch is divided among the processes. Five
conversations, batches of two, two processes (an epoch leaves out the rest, here conversation 2):

    length           1   2     3   4     5
    conversation     1   3     0   4     2
    process          p0  p1    p0  p1
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from treespec.heads.sampled_rows import SampledRows
from treespec.kernels.workers import end_workers
from treespec.train.data.anchors import RowSampling, draw_batch, draw_rows

MAX_DRAFT_STEPS = 64  # of a head, by the range of its options
POOL_BATCHES = 64  # batches sorted by length together: less than 5 % is padding


class Forward(NamedTuple):
    """A process's part of a batch.

    Attributes:
        batch: the number of the batch in the run, from 0.
        conversations: the numbers of the conversations.
        all_conversations: the same of all processes together.
        position_counts: what the losses of the forward are divided by (`share_position_counts`); (): its own counts.
        sample: the rows that draft, on the CPU; None: all.
    """

    batch: int
    conversations: list[int]
    all_conversations: list[int]
    position_counts: tuple[float, ...] = ()
    sample: SampledRows | None = None


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
            shares = [share_batch(batch, rank, processes) for rank in range(processes)]
            all_conversations = [conversation for share in shares for conversation in share]
            yield Forward(number, shares[process], all_conversations)


def share_batch(batch: list[int], process: int, processes: int) -> list[int]:
    """Select a process's conversations of a batch; with fewer conversations than processes some get them all."""
    share = batch[process::processes]
    if not share:
        return batch
    return share


def share_position_counts(
    coming: Iterator[Forward],
    per_step: int,
    processes: int,
    loss_masks: Sequence[Tensor],
    sampling: RowSampling | None = None,
) -> Iterator[Forward]:
    """Yield the forwards, each with its sampled rows and the number of positions by which its losses are divided.

    The loss of an optimizer step is the mean over the positions of all its forwards in all processes: a position
    weighs the same in a short answer and in a long one, in one process and in many. Gradients are averaged over
    forwards and processes, so that the divisor is their mean number of positions. Two processes, a forward each,
    with 2 and 6 positions of draft step 1, and 1 and 5 of step 2:

        position_counts    4  3

    Args:
        coming: the forwards of this process.
        per_step: its forwards in an optimizer step.
        processes: the number of processes.
        loss_masks: [T] bool of each conversation.
        sampling: how the rows that draft are sampled; None: all rows draft.
    """
    while forwards := list(islice(coming, per_step)):
        positions = torch.zeros(MAX_DRAFT_STEPS, dtype=torch.int64, device="cpu")
        for forward in forwards:
            for conversation in forward.all_conversations:
                mask = loss_masks[conversation]
                sample: SampledRows | None = None
                if sampling is not None:
                    sample = draw_rows(mask, sampling, forward.batch, conversation)
                positions += count_positions(mask, sample)
        counts = tuple((positions / (len(forwards) * processes)).tolist())
        for forward in forwards:
            sample = None
            if sampling is not None:
                sample = draw_batch(loss_masks, sampling, forward.batch, forward.conversations)
            yield forward._replace(position_counts=counts, sample=sample)


def count_positions(loss_mask: Tensor, sample: SampledRows | None = None) -> Tensor:
    """Count the positions of a conversation that draft step 1, 2, … learns from: [MAX_DRAFT_STEPS] int64.

    Step s drafts tokens s + 1 and later, and learns from those that count.

    Args:
        loss_mask: [T] bool.
        sample: the rows that draft; None: all.
    """
    wanted = loss_mask[2:]
    if sample is None:
        later = wanted.long().flip(0).cumsum(0).flip(0)[:MAX_DRAFT_STEPS]
    else:
        levels = min(len(sample.widths), len(wanted))
        later = sample.mark_levels(wanted[None], levels).sum((1, 2))
    return pad(later, (0, MAX_DRAFT_STEPS - len(later)))


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
