"""A run that has begun, and one optimizer step of it.

A step is the forwards of each process, and the gradient over all of them.

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

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch import Tensor, nn

from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.batches import padded
from treespec.train.data.prepare import Data
from treespec.train.files.checkpoints import latest_step
from treespec.train.files.record import Record
from treespec.train.losses.teacher import Batch, LawTokens, Loss

# Skipped steps that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


@dataclass(frozen=True)
class Run:
    """record: the content of OUT/training/config.json. model: the head, wrapped where accelerate
    needs it.

    stored: dtype of the head's file. law_tokens: what the cross-entropy is over; None is all tokens.
    """

    config: TrainConfig
    record: Record
    accelerator: Accelerator
    target: Target
    data: Data
    model: nn.Module
    optimizer: AcceleratedOptimizer
    stored: torch.dtype
    law_tokens: LawTokens | None = None

    @property
    def folder(self) -> Path:
        """OUT/training."""
        return Path(self.config.out) / "training"

    @property
    def head(self) -> Head:
        """The head as it is trained, in float32."""
        return self.accelerator.unwrap_model(self.model)

    def served(self) -> Head:
        """A copy of the head as it will be served: from its file, in the target's dtype.

        What the target shares with it, such as the embedding, is not copied.
        """
        own = dict(self.head.named_parameters())
        shared = {id(own[name]): own[name] for name in self.head.optional & own.keys()}
        head = copy.deepcopy(self.head, shared)
        for name, parameter in head.named_parameters():
            if name not in head.optional:
                parameter.data = parameter.data.to(self.stored).to(self.target.dtype)
        cast(nn.Module, head).eval()
        return head

    def held_out(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [T], loss mask [T] and features [T, F] of conversations to validate on."""
        for example in self.data.held_out[: self.config.validate_on]:
            tokens = example.input_ids.to(self.target.output_device)
            features = self.target.features(tokens[None], self.head.taps, last=True)[0]
            yield tokens, example.loss_mask.to(tokens.device), features

    def agreed(self, value: float) -> float:
        """The main process's value, in all processes.

        What they decide by values of their own, such as a clock's, would differ: they would come to
        other weights, or wait for each other for ever.
        """
        if self.accelerator.num_processes == 1:
            return value
        own = torch.tensor(value, dtype=torch.float32, device=self.accelerator.device)
        return float(broadcast(own))


def check_weights(head: Head, what: str, folder: Path) -> None:
    """Raises InputError for weights that are not finite. what: whose weights they are."""
    if any(not value.isfinite().all() for value in head.state_dict().values()):
        raise diverged(f"the weights of {what} are not finite", folder)


def diverged(what: str, folder: Path) -> InputError:
    """The error of a run that cannot go on. It says which checkpoint is left in OUT/training."""
    step = latest_step(folder)
    kept = "no checkpoint was written"
    if step is not None:
        kept = f"the checkpoint of step {step} is kept in {folder}"
    return InputError(
        f"{what}; {kept}. Lower --learning-rate, or look at the loss's options and the target's --dtype"
    )


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
