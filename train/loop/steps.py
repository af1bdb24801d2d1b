"""The optimizer steps of a run. A resumed run reaches the same weights.

A step whose gradient is not finite would fill the weights with NaN. It is skipped: the weights stay as they
were. Many skipped steps in a row end the run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.files.atomic import write_json
from treespec.train import checkpoints
from treespec.train.checkpoints import Place, find_latest_step
from treespec.train.data.anchors import choose_sampling
from treespec.train.data.batches import (
    Forward,
    iterate_forwards,
    pad_rows,
    read_ahead,
    share_position_counts,
)
from treespec.train.loop.best import has_run_ended, is_validation_due, look
from treespec.train.loop.meter import Meter
from treespec.train.loop.plan import RunPlan, compute_learning_rate, draft_steps_at, plan_run
from treespec.train.loop.run import TrainingRun, build_divergence_error, check_head_weights
from treespec.train.loop.stopping import StopRequest
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.losses.tokens import Loss
from treespec.train.progress import SharedTimer
from treespec.train.verdict import measure_length, warn_of_passes

MOST_PREPARATION = 0.5  # largest share of --minutes that goes by before the first step
# Skipped steps in a row that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


@dataclass
class SkippedSteps:
    """Counts skipped steps, whose gradient was not finite.

    Attributes:
        first: the number of finished steps when the process started.
        in_a_row: the number of skipped steps since the last good one.
    """

    first: int
    in_a_row: int = 0

    def count(self, good: bool) -> None:
        """Count a step. good: whether it was not skipped."""
        self.in_a_row += 1
        if good:
            self.in_a_row = 0

    def check(self, step: int, ends: bool, folder: Path) -> None:
        """Raises InputError after `IN_A_ROW` skipped steps, and at the end of a run without a good step.

        Args:
            step: finished steps.
            ends: whether the run ends with this step.
            folder: OUT/training, for the message.
        """
        none_good = ends and 0 < self.in_a_row == step - self.first
        if self.in_a_row == IN_A_ROW or none_good:
            since = f"since step {step - self.in_a_row + 1}"
            raise build_divergence_error(f"the loss or its gradient is not finite {since}", folder)


def compute_ready_forwards(
    run: TrainingRun, plan: RunPlan, step: int
) -> Iterator[tuple[Forward, Tensor]]:
    """Yield this process's forwards after `step` steps, with the target's features [B, T, F], without end.

    With stored features, those of the next forward are read while the present one is computed.
    """
    accelerator = run.accelerator
    first = step * plan.per_step
    processes = accelerator.num_processes
    coming = share_position_counts(
        iterate_forwards(first, plan.batches_of, accelerator.process_index, processes),
        plan.per_step,
        processes,
        [example.loss_mask for example in run.data.train],
        choose_sampling(run.config),
    )
    if run.config.features is not None:
        yield from read_ahead(coming, run.data.features)
    else:
        for forward in coming:
            yield forward, run.data.features(forward.conversations)


def run_training_steps(
    run: TrainingRun,
    stop: StopRequest,
    after_step: Callable[[int], None],
    prepared_seconds: float = 0.0,
) -> Place:
    """Run the remaining optimizer steps, with reports, checkpoints and validations.

    Args:
        run: the run.
        stop: ends the run after the step in which it is made.
        after_step: called after each step with the number of finished steps.
        prepared_seconds: seconds since the start of the program; `--minutes` counts them, up to a half.
            Default: 0.

    Returns:
        The progress at the end.

    Raises:
        InputError: for a run that diverges.
        KeyboardInterrupt: for a run that was stopped. Its last step is saved, unless it was skipped.
    """
    # 1. Load the last checkpoint, and plan the run.
    config = run.config
    accelerator = run.accelerator
    recipe = run.config.hyperparameters
    place = checkpoints.load_checkpoint(run.folder, run.head, run.optimizer.optimizer)
    plan = plan_run(run)
    clock = plan.clock
    place.seconds += count_preparation(clock.minutes, prepared_seconds)
    passes = PassesWarning(run, plan)
    accelerator.gradient_accumulation_steps = plan.per_step
    timer = SharedTimer(accelerator, place.seconds)
    ready = compute_ready_forwards(run, plan, place.step)
    meter = Meter(accelerator, run.folder / "metrics.jsonl", place)
    skipped = SkippedSteps(place.step)
    place.seconds = timer.elapsed()
    progress = clock.measure_progress(place.step, place.seconds)
    ended = has_run_ended(config, place, progress)
    while not ended and not stop.is_requested():
        # 2. Run a step; it is skipped if its gradient is not finite.
        rate = compute_learning_rate(recipe, clock, place.step, place.seconds)
        run.set_learning_rate(rate)
        draft_steps = draft_steps_at(recipe, progress)
        result = run_optimizer_step(run, islice(ready, plan.per_step), draft_steps)
        place.step += 1
        place.seconds = timer.elapsed()
        progress = clock.measure_progress(place.step, place.seconds)

        # 3. Report it.
        skipped.count(result.good)
        if result.good:
            meter.count(result.losses)
        else:
            meter.write({"step": place.step, "skipped": skipped.in_a_row})
        skipped.check(place.step, progress == 1, run.folder)
        if progress == 1 or meter.is_due(place.step, place.seconds):
            meter.write_line(place.step, place.seconds, progress, rate)
            passes.warn(round(place.step / progress))

        # 4. Validate and save, if they are due. More is validated at the end of the run.
        if is_validation_due(config.validate_every, place, progress):
            look_unless_stopped(run, stop, place, meter, progress)
        ended = has_run_ended(config, place, progress)
        if result.good and (ended or place.step % config.checkpoint_every == 0):
            save_run_checkpoint(run, place)
        after_step(place.step)

    # 5. Save the last step of a run that was stopped.
    end_if_stopped(run, stop, place, skipped)
    return place


def look_unless_stopped(
    run: TrainingRun, stop: StopRequest, place: Place, meter: Meter, progress: float
) -> None:
    """Validate during a run. Somebody who wants it to stop need not wait for that, unless processes need each other."""
    if run.config.shard_target:
        if not stop.is_requested():
            look(run, place, meter, progress)
    elif not stop.is_signalled:
        with stop.interruptible():
            look(run, place, meter, progress)


def end_if_stopped(
    run: TrainingRun, stop: StopRequest, place: Place, skipped: SkippedSteps
) -> None:
    """Write the checkpoint of a stopped run's last step, unless it has one or was skipped. All processes call it.

    Raises KeyboardInterrupt if the run was stopped.
    """
    if not stop.is_requested():
        return
    if place.step > 0 and skipped.in_a_row == 0 and find_latest_step(run.folder) != place.step:
        save_run_checkpoint(run, place)
    run.accelerator.wait_for_everyone()  # the first process that ends would have the others killed
    raise KeyboardInterrupt


def count_preparation(minutes: float, prepared_seconds: float) -> float:
    """Return how many seconds of preparation `--minutes` counts: at most half of the run; 0 without a limit."""
    return min(prepared_seconds, MOST_PREPARATION * 60 * minutes)


@dataclass
class PassesWarning:
    """Prints once that a run sees its texts too often.

    Attributes:
        run: the run.
        plan: its plan.
        is_printed: whether it was printed.
    """

    run: TrainingRun
    plan: RunPlan
    is_printed: bool = False

    def warn(self, steps: int) -> None:
        """Print it if it holds. steps: the steps of the whole run, at its speed so far."""
        if self.is_printed:
            return
        length = measure_length(steps, self.plan.step_conversations, self.run.data)
        for line in warn_of_passes(length.passes):
            self.is_printed = True
            self.run.accelerator.print(line)


def save_run_checkpoint(run: TrainingRun, place: Place) -> None:
    """Write the checkpoint of a step, in the main process. Raises InputError for weights that are not finite."""
    if not run.accelerator.is_main_process:
        return
    check_head_weights(run.head, f"the head after step {place.step}", run.folder)
    write_json(run.folder / "config.json", run.record)
    checkpoints.save_checkpoint(run.folder, run.head, run.optimizer.optimizer, place)


class StepResult(NamedTuple):
    """The result of an optimizer step.

    Attributes:
        losses: the losses of this process's forwards, without gradients.
        good: whether losses and gradients were finite in all processes. If not, the step was skipped.
    """

    losses: list[Loss]
    good: bool


def run_optimizer_step(
    run: TrainingRun, forwards: Iterable[tuple[Forward, Tensor]], steps: int
) -> StepResult:
    """Run one optimizer step over the gradients of all forwards; skip it if they are not finite.

    Args:
        run: the run.
        forwards: this process's forwards, with features [B, T, F].
        steps: the number of draft steps to train over.
    """
    # 1. Compute the gradients of all losses. Their graphs are not kept.
    accelerator = run.accelerator
    losses = []
    for forward, features in forwards:
        with accelerator.accumulate(run.model):
            loss = compute_forward_loss(run, forward, features, steps)
            accelerator.backward(loss.total)
            losses.append(loss._replace(total=loss.total.detach()))

    # 2. Step in all processes or in none, because their weights must stay equal. A gradient scaler skips
    #    bad steps itself, and lowers its scale.
    total = torch.stack([loss.total for loss in losses]).sum().to(accelerator.device)
    norm = accelerator.clip_grad_norm_(run.head.parameters(), run.config.hyperparameters.clip)
    if norm is not None:
        total = total + norm.to(total.device)
    good = bool(accelerator.reduce(total, reduction="sum").isfinite())
    if good or accelerator.scaler is not None:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return StepResult(losses, good)


def compute_forward_loss(run: TrainingRun, forward: Forward, features: Tensor, steps: int) -> Loss:
    """Compute the loss of one forward. Noise and dropout follow from the seed, the batch and the process.

    Args:
        run: the run.
        forward: the numbers of the conversations, and what their losses are divided by.
        features: [B, T, F] the target's features.
        steps: the number of draft steps to train over.
    """
    config = run.config
    device = features.device
    seed = (config.seed * 1_000_003 + forward.batch) * 1009 + run.accelerator.process_index
    if config.hyperparameters.dropout:
        torch.manual_seed(seed)  # `nn.Dropout` takes no generator
    sample = forward.sample
    if sample is not None:
        sample = sample.to_device(device)
    rows = [run.data.train[i] for i in forward.conversations]
    lengths = torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int64, device="cpu")
    batch = TrainingBatch(
        tokens=pad_rows([row.input_ids for row in rows]).to(device),
        loss_mask=pad_rows([row.loss_mask for row in rows]).to(device),
        features=features,
        lengths=lengths,
        generator=torch.Generator(device).manual_seed(seed),
        steps=steps,
        vocabulary=run.vocabulary,
        position_counts=forward.position_counts,
        sample=sample,
    )
    # Autocast holds for the output layers too: the loss applies them, not the model.
    with run.accelerator.autocast():
        total, parts = config.training.load_objective()(config, run.target, run.model, batch)
    return Loss(total, parts | {"tokens": lengths.sum().float().to(device)})
