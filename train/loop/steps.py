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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from accelerate.utils import broadcast
from torch import Tensor

from treespec.files.atomic import write_json
from treespec.heads.training import Recipe
from treespec.train import checkpoints
from treespec.train.checkpoints import Place
from treespec.train.data.batches import Forward, epoch_batches, forwards, padded, read_ahead
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import Run, check_weights, diverged, look
from treespec.train.losses.objectives import Batch
from treespec.train.losses.tokens import Loss

MOST_WARM_UP = 0.1  # of the run
# Skipped steps that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


@dataclass(frozen=True)
class Clock:
    """total: steps after which the run ends. minutes: after which it ends; 0 is no limit."""

    total: int
    minutes: float = 0.0

    def behind(self, step: int, seconds: float) -> float:
        """The share of the run that is behind after `step` steps and `seconds`; 1 is its end."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(step / self.total, by_time))


def learning_rate(recipe: Recipe, clock: Clock, step: int, seconds: float) -> float:
    """The rate of the step after `step` steps and `seconds`.

    It rises in a line over the warm-up, at most a tenth of the run, and then falls as the recipe
    says.
    """
    steps = step / clock.behind(step, seconds) if step else clock.total  # at the pace so far
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


def fit(run: Run, after_step: Callable[[int], None]) -> Place:
    """All optimizer steps that are left, with progress, checkpoints and validations.

    Returns where the run ended. Raises InputError for a run that diverges.
    """
    # 1. Where the run is, and how long it goes.
    config = run.config
    accelerator = run.accelerator
    recipe = run.config.recipe
    data = run.data
    place = checkpoints.load(run.folder, run.head, run.optimizer.optimizer)
    processes = accelerator.num_processes
    first = place.step
    in_a_row = 0
    each = accelerator.gradient_accumulation_steps = config.forwards(processes)
    lengths = [len(example.input_ids) for example in data.train]
    batches_of = partial(epoch_batches, lengths, config.batch_size * processes, config.seed)
    steps = config.max_steps or max(1, recipe.epochs * len(batches_of(0)) // each)
    clock = Clock(steps, config.minutes)
    started = time.perf_counter() - place.seconds

    # 2. The forwards of this process, with the target's features.
    mine = forwards(place.step * each, batches_of, accelerator.process_index, processes)
    live = ((forward, data.features(forward.conversations)) for forward in mine)
    ready = live if config.features is None else read_ahead(mine, data.features)

    def elapsed() -> float:
        """Seconds by the main process's clock: by their own, processes would decide otherwise."""
        own = torch.tensor(time.perf_counter() - started, device=accelerator.device)
        return float(broadcast(own))

    meter = Meter(accelerator, run.folder / "metrics.jsonl", place)
    place.seconds = elapsed()
    while (behind := clock.behind(place.step, place.seconds)) < 1:
        # 3. A step; one whose gradient is not finite is skipped.
        rate = learning_rate(recipe, clock, place.step, place.seconds)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        losses, good = optimizer_step(run, islice(ready, each), draft_steps_at(recipe, behind))
        place.step += 1
        place.seconds = elapsed()
        behind = clock.behind(place.step, place.seconds)
        if good:
            in_a_row = 0
            meter.count(losses)
        else:
            in_a_row += 1
            meter.write({"step": place.step, "skipped": in_a_row})
        if in_a_row == IN_A_ROW or (behind == 1 and 0 < in_a_row == place.step - first):
            since = f"since step {place.step - in_a_row + 1}"
            raise diverged(f"the loss or its gradient is not finite {since}", run.folder)
        if behind == 1 or meter.due(place.step, place.seconds):
            meter.line(place.step, place.seconds, behind, rate)

        # 4. Validate and save, where it is time. The end of the run is validated later.
        # Weights that are not finite are never saved.
        if behind < 1 and config.validate_every and place.step % config.validate_every == 0:
            look(run, place, meter)
        if (
            good
            and accelerator.is_main_process
            and (behind == 1 or place.step % config.checkpoint_every == 0)
        ):
            check_weights(run.head, f"the head after step {place.step}", run.folder)
            write_json(run.folder / "config.json", run.record)
            checkpoints.save(run.folder, run.head, run.optimizer.optimizer, place)
        after_step(place.step)
    return place


def optimizer_step(
    run: Run, mine: Iterable[tuple[Forward, Tensor]], steps: int
) -> tuple[list[Loss], bool]:
    """One optimizer step over the gradients of all forwards, unless they are not finite.

    mine: this process's, with features [B, T, F]. steps: draft steps to train over. Returns their
    losses without gradients, and whether losses and gradient are finite in all processes.
    """
    # 1. The gradients of all losses, of which no graph is kept.
    accelerator = run.accelerator
    losses = []
    for forward, features in mine:
        with accelerator.accumulate(run.model):
            loss = loss_of(run, forward, features, steps)
            accelerator.backward(loss.total)
            losses.append(loss._replace(total=loss.total.detach()))

    # 2. A step of all processes or of none, as their weights must stay the same; a scaler skips a
    #    bad one itself, and lowers its scale.
    known = torch.stack([loss.total for loss in losses]).sum().to(accelerator.device)
    norm = accelerator.clip_grad_norm_(run.head.parameters(), run.config.recipe.clip)
    known = known if norm is None else known + norm.to(known.device)
    good = bool(accelerator.reduce(known, reduction="sum").isfinite())
    if good or accelerator.scaler is not None:
        run.optimizer.step()
    run.optimizer.zero_grad()
    return losses, good


def loss_of(run: Run, forward: Forward, features: Tensor, steps: int) -> Loss:
    """The loss of one forward. Its noise and dropout follow from the seed and its place."""
    config = run.config
    device = features.device
    seed = (config.seed * 1_000_003 + forward.batch) * 1009 + run.accelerator.process_index
    if config.recipe.dropout:
        torch.manual_seed(seed)  # `nn.Dropout` takes no generator
    rows = [run.data.train[i] for i in forward.conversations]
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    batch = Batch(
        padded([row.input_ids for row in rows]).to(device),
        padded([row.loss_mask for row in rows]).to(device),
        features,
        lengths,
        torch.Generator(device).manual_seed(seed),
        steps,
        run.vocabulary,
    )
    with run.accelerator.autocast():  # for the output layers, which the loss applies itself
        total, parts = config.training.loss()(config, run.target, run.model, batch)
    return Loss(total, parts | {"tokens": lengths.sum().float().to(device)})
