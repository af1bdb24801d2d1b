"""The order of training: a function of the seed and the epoch, so that a run can resume at any step.

Conversations of similar lengths form a batch, and each batch is divided among the processes. Five
conversations, batches of two, two processes (an epoch leaves out the rest, here conversation 2):

    length           1   2     3   4     5
    conversation     1   3     0   4     2
    process          p0  p1    p0  p1

With --batch-tokens the sizes of batches differ. A batch is padded to its longest conversation and then has at most that
number of tokens. Six conversations, at most eight tokens in a process, two processes:

    length           1   2     3   4     5   6
    conversation     1   3     0   4     2   5
    process          p0  p1    p0  p1    p0  p1
    batch            0   0     0   0     1   1         two of at most four tokens; a third would make 3 · 6
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
# Batches sorted by length together. Of forwards of 4 conversations 1.1 % is padding with ShareGPT's, 3.0 % with short
# ones (191 tokens on average); in random order it is 40 and 46 %.
POOL_BATCHES = 64


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
    generator = make_epoch_generator(seed, epoch)
    batches = []
    order = draw_order(len(lengths), generator)
    for pool in sort_pools(order, POOL_BATCHES * batch_size, lengths):
        full = range(0, len(pool) - batch_size + 1, batch_size)
        batches += [pool[i : i + batch_size] for i in full]
    return shuffle_batches(batches, order, generator)


def pack_epoch(
    lengths: Sequence[int], batch_tokens: int, processes: int, seed: int, epoch: int
) -> list[list[int]]:
    """Split an epoch into batches with at most `batch_tokens` tokens a process, padding counted, in random order.

    All processes get equally many conversations; at most `processes` - 1 of a pool are dropped.

    Args:
        lengths: the number of tokens of each example, at most `batch_tokens`.
        batch_tokens: tokens of a process's part of a batch.
        processes: the number of processes.
        seed: the run's seed.
        epoch: the number of the epoch; each has another order, and may have another number of batches.

    Returns:
        For each batch the numbers of its examples.
    """
    generator = make_epoch_generator(seed, epoch)
    rows = max(1, batch_tokens * len(lengths) // sum(lengths))
    batches = []
    order = draw_order(len(lengths), generator)
    for pool in sort_pools(order, POOL_BATCHES * rows * processes, lengths):
        even = pool[: len(pool) // processes * processes]
        batches += split_by_tokens(even, lengths, batch_tokens, processes)
    return shuffle_batches(batches, order, generator)


def split_by_tokens(
    numbers: Sequence[int], lengths: Sequence[int], batch_tokens: int, processes: int = 1
) -> list[list[int]]:
    """Split examples in order into groups of at most `batch_tokens` tokens a process, padding counted.

    Args:
        numbers: of the examples, by ascending length; a multiple of `processes`.
        lengths: the number of tokens of each example.
        batch_tokens: tokens of a process's part of a group. A single row may have more.
        processes: the number of processes. Default: 1.
    """
    groups: list[list[int]] = []
    for start in range(0, len(numbers), processes):
        row = numbers[start : start + processes]
        longest = lengths[row[-1]]
        if groups and (len(groups[-1]) // processes + 1) * longest <= batch_tokens:
            groups[-1].extend(row)
        else:
            groups.append(list(row))
    return groups


def make_epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Make the generator of an epoch's order."""
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def draw_order(examples: int, generator: torch.Generator) -> list[int]:
    """Draw an order of the examples."""
    order: list[int] = torch.randperm(examples, generator=generator, device="cpu").tolist()
    return order


def sort_pools(order: Sequence[int], size: int, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield `size` examples after another of an order, each time sorted by length."""
    for start in range(0, len(order), size):
        yield sorted(order[start : start + size], key=lambda i: (lengths[i], i))


def shuffle_batches(
    batches: list[list[int]], order: list[int], generator: torch.Generator
) -> list[list[int]]:
    """Put batches into random order. Without any, one batch has all examples, in `order`."""
    if not batches:
        return [order]
    return [batches[i] for i in draw_order(len(batches), generator)]


def iterate_forwards(
    first: int, batches_of: Callable[[int], list[list[int]]], process: int, processes: int
) -> Iterator[Forward]:
    """Yield the forwards of a process from batch `first` of the run on, without end.

    Args:
        first: the number of the first batch, counted from the start of the run.
        batches_of: (epoch) -> its batches.
        process: the number of this process.
        processes: the number of processes.
    """
    number = -1
    for epoch in count():
        for batch in batches_of(epoch):
            number += 1
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
