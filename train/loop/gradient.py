"""One optimizer step: the forwards of each process, and the gradient over all of them.

A run that began with G processes divides each batch into G groups, one a forward. Later it may go
on with another number of processes, which share the same forwards. Two batches a step, G = 2:

    batch, group        0,0  0,1  1,0  1,1
    of 2 processes      p0   p1   p0   p1
    of 1 process        p0   p0   p0   p0
    of 4 processes      p0   p1   p2   p3

Order, noise and groups stay the same, so the gradient does, but for the order of its sum.

A step whose gradient is not finite would fill the weights with NaN. It is skipped, and the weights
stay as they were. Many skipped steps in a row end the run.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import torch
from accelerate import Accelerator

from treespec.errors import InputError
from treespec.train.data.batches import padded
from treespec.train.loop.run import Run, diverged
from treespec.train.losses.teacher import Batch, Loss

# Skipped steps that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


class Forward(NamedTuple):
    """conversations: of group `group` in batch `batch`, counted from the start of the run."""

    batch: int
    group: int
    conversations: list[int]


def forwards(
    batches: Sequence[tuple[int, list[int]]], groups: int, processes: int, process: int
) -> list[Forward]:
    """The forwards of one process in a step. batches: (number, conversations) each."""
    all_forwards = [
        Forward(batch, group, numbers[group::groups] or numbers)
        for batch, numbers in batches
        for group in range(groups)
    ]
    return all_forwards[process::processes]


def forwards_from(
    batches: Iterator[tuple[int, list[int]]], per_step: int, groups: int, accelerator: Accelerator
) -> Iterator[Forward]:
    """This process's forwards of one step of `per_step` batches after another, without an end."""
    while True:
        step = list(islice(batches, per_step))
        yield from forwards(step, groups, accelerator.num_processes, accelerator.process_index)


def forwards_each(total: int, groups: int, processes: int) -> int:
    """Forwards of each process in a step of `total`. Raises InputError if they do not divide."""
    if total % processes:
        fitting = ", ".join(str(count) for count in range(1, total + 1) if total % count == 0)
        raise InputError(
            f"the run began with {groups} processes and makes {total} forwards a step: go on with "
            f"{fitting} processes, not {processes}"
        )
    return total // processes


def optimizer_step(run: Run, mine: Iterable[Forward], steps: int) -> tuple[list[Loss], bool]:
    """One optimizer step over the gradients of all forwards, unless they are not finite.

    mine: this process's. steps: draft steps to train over. Returns their losses without gradients,
    and whether losses and gradient are finite in all processes.
    """
    accelerator, optimizer, good = run.accelerator, run.optimizer, True
    losses: list[Loss] = []
    total = torch.zeros((), device=accelerator.device)
    for forward in mine:
        with accelerator.accumulate(run.model):
            # 1. the loss, of which no graph is kept
            loss = loss_of(run, forward, steps)
            accelerator.backward(loss.total)
            parts = {name: value.detach() for name, value in loss.parts.items()}
            losses.append(Loss(loss.total.detach(), parts))
            total += losses[-1].total.to(total.device)

            # 2. a step of all processes or of none, as their weights must stay the same; a scaler
            #    skips a bad one itself, and lowers its scale
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(run.head.parameters(), run.config.recipe.clip)
                known = total if norm is None else total + norm.to(total.device)
                good = bool(accelerator.reduce(known, reduction="sum").isfinite().all())
            if good or accelerator.scaler is not None:
                optimizer.step()
            optimizer.zero_grad()
    return losses, good


def loss_of(run: Run, forward: Forward, steps: int) -> Loss:
    """The loss of one forward. Its noise and dropout follow from the seed and its place."""
    config = run.config
    seed = (config.seed * 1_000_003 + forward.batch) * 1009 + forward.group
    if config.recipe.dropout:
        torch.manual_seed(seed)  # `nn.Dropout` takes no generator
    rows = [run.data.train[i] for i in forward.conversations]
    features = run.data.features(forward.conversations)  # [B, T, F]
    batch = Batch(
        padded([row.input_ids for row in rows]).to(features.device),
        padded([row.loss_mask for row in rows]).to(features.device),
        features,
        torch.tensor([len(row.input_ids) for row in rows]),
        torch.Generator(features.device).manual_seed(seed),
        steps,
        run.law_tokens,
    )
    loss: Loss
    with run.accelerator.autocast():  # for the output layers, which the loss applies itself
        loss = config.training.loss()(config, run.target, run.model, batch)
    return loss


@final
class Skips:
    """Counts the skipped steps of a run. folder: OUT/training, whose checkpoint an error names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps, self.total, self.in_a_row = 0, 0, 0

    def count(self, good: bool, step: int) -> None:
        """Count step `step`. Raises InputError after `IN_A_ROW` bad ones in a row."""
        self.steps += 1
        self.total += not good
        self.in_a_row = 0 if good else self.in_a_row + 1
        if self.in_a_row == IN_A_ROW:
            first = step - IN_A_ROW + 1
            raise diverged(
                f"the loss or its gradient is not finite since step {first}", self.folder
            )

    def refuse_nothing_learnt(self) -> None:
        """Raises InputError where no step of the run was a good one."""
        if self.steps and self.total == self.steps:
            raise diverged("the loss or its gradient was not finite at any step", self.folder)
