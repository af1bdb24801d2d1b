"""The steps of a run, which resumes to the same weights.

One clock tells how far a run is; warm-up, decay, growth and the end of the run all read it. It
counts steps, or minutes where they end the run first; so the rates are a function of the clock and
not a scheduler of torch, which counts steps alone. A run of 100 steps, or as long:

    behind          0      0.1              0.5               1
    learning rate   rises  is highest       falls             is the recipe's last rate
    draft steps     1                       all of them

A step whose gradient is not finite would fill the weights with NaN. It is skipped, and the weights
stay as they were. Many skipped steps in a row end the run.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from treespec.files.atomic import write_json
from treespec.heads.training import Recipe
from treespec.train import checkpoints
from treespec.train.checkpoints import Place
from treespec.train.data.batches import Forward, iterate_forwards, pad_rows, read_ahead, split_epoch
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import TrainingRun, build_divergence_error, check_head_weights, look
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.losses.tokens import Loss

MOST_WARM_UP = 0.1  # of the run
# Skipped steps that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


@dataclass(frozen=True)
class Clock:
    """total: steps after which the run ends. minutes: after which it ends; 0 is no limit."""

    total: int
    minutes: float = 0.0

    def measure_progress(self, step: int, seconds: float) -> float:
        """The share of the run that is behind after `step` steps and `seconds`; 1 is its end."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(step / self.total, by_time))


def compute_learning_rate(recipe: Recipe, clock: Clock, step: int, seconds: float) -> float:
    """The rate of the step after `step` steps and `seconds`.

    It rises in a line over the warm-up, at most a tenth of the run, and then falls as the recipe
    says.
    """
    steps = (
        step / clock.measure_progress(step, seconds) if step else clock.total
    )  # at the pace so far
    most = MOST_WARM_UP * steps
    warm_up = most if recipe.warm_up is None else min(recipe.warm_up, most)
    rising = (step + 1) / max(warm_up, 1)
    behind = min(1.0, max(0.0, step - warm_up) / (steps - warm_up))
    left = 1 - behind if recipe.decay == "linear" else (1 + math.cos(math.pi * behind)) / 2
    falling = recipe.last_rate + (1 - recipe.last_rate) * left
    return recipe.learning_rate * min(rising, falling)


def draft_steps_at(recipe: Recipe, behind: float) -> int:
    """Draft steps to train over: one at first, and all of them from `--grow-at` on."""
    return 1 if behind < recipe.grow_at else recipe.unrolled_steps


class SharedTimer:
    """Seconds of training by the main process's clock: by their own, processes would decide otherwise.

    before: the seconds that the run took until now.
    """

    def __init__(self, accelerator: Accelerator, before: float) -> None:
        self.device = accelerator.device
        self.started = time.perf_counter() - before

    def elapsed(self) -> float:
        """The seconds so far; all processes call it."""
        own = torch.tensor(time.perf_counter() - self.started, device=self.device)
        return float(broadcast(own))


@dataclass
class SkippedSteps:
    """The steps in a row whose gradient was not finite. first: finished steps as the process began."""

    first: int
    in_a_row: int = 0

    def count(self, good: bool) -> None:
        """A step. good: whether it was taken."""
        self.in_a_row += 1
        if good:
            self.in_a_row = 0

    def check(self, step: int, ends: bool, folder: Path) -> None:
        """Raises InputError after `IN_A_ROW` of them, and at the end of a run where no step was good.

        Args:
            step: finished steps.
            ends: whether the run ends here.
            folder: OUT/training, for the message.
        """
        none_good = ends and 0 < self.in_a_row == step - self.first
        if self.in_a_row == IN_A_ROW or none_good:
            since = f"since step {step - self.in_a_row + 1}"
            raise build_divergence_error(f"the loss or its gradient is not finite {since}", folder)


@dataclass(frozen=True)
class RunPlan:
    """The forwards of a run. per_step: those of a process in an optimizer step.

    batches_of: the batches of an epoch, each for all processes together. clock: when the run ends.
    """

    per_step: int
    batches_of: Callable[[int], list[list[int]]]
    clock: Clock


def plan_run(run: TrainingRun) -> RunPlan:
    """How many forwards a step has, which conversations they take, and how long the run goes."""
    config = run.config
    processes = run.accelerator.num_processes
    per_step = config.count_forwards(processes)
    lengths = [len(example.input_ids) for example in run.data.train]
    batches_of = partial(split_epoch, lengths, config.batch_size * processes, config.seed)
    steps = config.max_steps
    if not steps:
        steps = max(1, config.recipe.epochs * len(batches_of(0)) // per_step)
    return RunPlan(per_step, batches_of, Clock(steps, config.minutes))


def compute_ready_forwards(
    run: TrainingRun, plan: RunPlan, step: int
) -> Iterator[tuple[Forward, Tensor]]:
    """The forwards of this process after `step` steps, with the target's features [B, T, F].

    Stored features of the next forward are read while this one is computed.
    """
    accelerator = run.accelerator
    first = step * plan.per_step
    coming = iterate_forwards(
        first, plan.batches_of, accelerator.process_index, accelerator.num_processes
    )
    if run.config.features is not None:
        yield from read_ahead(coming, run.data.features)
    else:
        for forward in coming:
            yield forward, run.data.features(forward.conversations)


def run_training_steps(run: TrainingRun, after_step: Callable[[int], None]) -> Place:
    """Take all optimizer steps that are left, with progress, checkpoints and validations.

    Returns where the run ended. Raises InputError for a run that diverges.
    """
    # 1. Where the run is, and how long it goes.
    config = run.config
    accelerator = run.accelerator
    recipe = run.config.recipe
    place = checkpoints.load_checkpoint(run.folder, run.head, run.optimizer.optimizer)
    plan = plan_run(run)
    clock = plan.clock
    accelerator.gradient_accumulation_steps = plan.per_step
    timer = SharedTimer(accelerator, place.seconds)
    ready = compute_ready_forwards(run, plan, place.step)
    meter = Meter(accelerator, run.folder / "metrics.jsonl", place)
    skipped = SkippedSteps(place.step)
    place.seconds = timer.elapsed()
    behind = clock.measure_progress(place.step, place.seconds)
    while behind < 1:
        # 2. A step; one whose gradient is not finite is skipped.
        rate = compute_learning_rate(recipe, clock, place.step, place.seconds)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        draft_steps = draft_steps_at(recipe, behind)
        result = run_optimizer_step(run, islice(ready, plan.per_step), draft_steps)
        place.step += 1
        place.seconds = timer.elapsed()
        behind = clock.measure_progress(place.step, place.seconds)

        # 3. What is reported of it.
        skipped.count(result.good)
        if result.good:
            meter.count(result.losses)
        else:
            meter.write({"step": place.step, "skipped": skipped.in_a_row})
        skipped.check(place.step, behind == 1, run.folder)
        if behind == 1 or meter.is_due(place.step, place.seconds):
            meter.write_line(place.step, place.seconds, behind, rate)

        # 4. Validate and save, where it is time. The end of the run is validated later.
        if behind < 1 and is_multiple(place.step, config.validate_every):
            look(run, place, meter)
        if result.good and (behind == 1 or is_multiple(place.step, config.checkpoint_every)):
            save_run_checkpoint(run, place)
        after_step(place.step)
    return place


def is_multiple(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens after this one; 0 is never."""
    return every > 0 and step % every == 0


def save_run_checkpoint(run: TrainingRun, place: Place) -> None:
    """Write the checkpoint of a step, by the main process. Weights that are not finite are never saved."""
    if not run.accelerator.is_main_process:
        return
    check_head_weights(run.head, f"the head after step {place.step}", run.folder)
    write_json(run.folder / "config.json", run.record)
    checkpoints.save_checkpoint(run.folder, run.head, run.optimizer.optimizer, place)


class StepResult(NamedTuple):
    """losses: of this process's forwards, without gradients. good: whether losses and gradient are
    finite in all processes, so that the step was taken.
    """

    losses: list[Loss]
    good: bool


def run_optimizer_step(
    run: TrainingRun, mine: Iterable[tuple[Forward, Tensor]], steps: int
) -> StepResult:
    """Take one optimizer step over the gradients of all forwards, unless they are not finite.

    mine: this process's, with features [B, T, F]. steps: draft steps to train over.
    """
    # 1. The gradients of all losses. Their graphs are not kept.
    accelerator = run.accelerator
    losses = []
    for forward, features in mine:
        with accelerator.accumulate(run.model):
            loss = compute_forward_loss(run, forward, features, steps)
            accelerator.backward(loss.total)
            losses.append(loss._replace(total=loss.total.detach()))

    # 2. A step of all processes or of none, as their weights must stay the same; a scaler skips a
    #    bad one itself, and lowers its scale.
    total = torch.stack([loss.total for loss in losses]).sum().to(accelerator.device)
    norm = accelerator.clip_grad_norm_(run.head.parameters(), run.config.recipe.clip)
    if norm is not None:
        total = total + norm.to(total.device)
    good = bool(accelerator.reduce(total, reduction="sum").isfinite())
    if good or accelerator.scaler is not None:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return StepResult(losses, good)


def compute_forward_loss(run: TrainingRun, forward: Forward, features: Tensor, steps: int) -> Loss:
    """The loss of one forward. Its noise and dropout follow from the seed and its place."""
    config = run.config
    device = features.device
    seed = (config.seed * 1_000_003 + forward.batch) * 1009 + run.accelerator.process_index
    if config.recipe.dropout:
        torch.manual_seed(seed)  # `nn.Dropout` takes no generator
    rows = [run.data.train[i] for i in forward.conversations]
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    batch = TrainingBatch(
        tokens=pad_rows([row.input_ids for row in rows]).to(device),
        loss_mask=pad_rows([row.loss_mask for row in rows]).to(device),
        features=features,
        lengths=lengths,
        generator=torch.Generator(device).manual_seed(seed),
        steps=steps,
        vocabulary=run.vocabulary,
    )
    with run.accelerator.autocast():  # for the output layers, which the loss applies itself
        total, parts = config.training.load_objective()(config, run.target, run.model, batch)
    return Loss(total, parts | {"tokens": lengths.sum().float().to(device)})
