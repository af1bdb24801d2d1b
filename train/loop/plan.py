"""The plan of a run: its forwards and length, and the rate and draft steps along it.

Warm-up, decay, the growth of draft steps and the end of the run follow the progress, from 0 to 1. It counts
steps, or minutes if these end the run first. We compute the learning rate from it, because torch's schedulers
only count steps:

    progress        0      0.1              0.5               1
    learning rate   rises  is highest       falls             is the recipe's last rate
    draft steps     1                       all of them
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from treespec.heads.training import Recipe
from treespec.train.data.batches import pack_epoch, split_epoch
from treespec.train.loop.run import TrainingRun

MOST_WARM_UP = 0.1  # largest share of the run for the warm-up


@dataclass(frozen=True)
class Clock:
    """The length of a run. It ends after `total` steps or after `minutes`, whichever is first.

    Attributes:
        total: steps.
        minutes: minutes of training; 0: no limit.
    """

    total: int
    minutes: float = 0.0

    def measure_progress(self, step: int, seconds: float) -> float:
        """Compute the progress after `step` steps and `seconds`: from 0 to 1, the end of the run."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(step / self.total, by_time))


def compute_learning_rate(recipe: Recipe, clock: Clock, step: int, seconds: float) -> float:
    """Compute the learning rate of the next step, after `step` steps and `seconds`.

    The rate rises linearly during the warm-up, at most a tenth of the run, and then falls as the recipe
    says. If minutes end the run, its number of steps is estimated from the speed so far.

    Args:
        recipe: the kind's recipe.
        clock: the length of the run.
        step: finished steps.
        seconds: seconds of training so far.
    """
    # Steps of the whole run, at the speed so far.
    steps = step / clock.measure_progress(step, seconds) if step else clock.total
    max_warm_up = MOST_WARM_UP * steps
    warm_up = max_warm_up if recipe.warm_up is None else min(recipe.warm_up, max_warm_up)
    rising = (step + 1) / max(warm_up, 1)
    decay_progress = min(1.0, max(0.0, step - warm_up) / (steps - warm_up))
    decay = (
        1 - decay_progress
        if recipe.decay == "linear"
        else (1 + math.cos(math.pi * decay_progress)) / 2
    )
    falling = recipe.last_rate + (1 - recipe.last_rate) * decay
    return recipe.learning_rate * min(rising, falling)


def draft_steps_at(recipe: Recipe, progress: float) -> int:
    """The number of draft steps to train over: one at first, all of them from `--grow-at` on."""
    return 1 if progress < recipe.grow_at else recipe.unrolled_steps


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        per_step: the number of forwards of a process in an optimizer step.
        batches_of: (epoch) -> its batches, each for all processes together.
        clock: the length of the run.
    """

    per_step: int
    batches_of: Callable[[int], list[list[int]]]
    clock: Clock

    @property
    def step_conversations(self) -> float:
        """The conversations of an optimizer step in all processes, on average over the first epoch."""
        batches = self.batches_of(0)
        return self.per_step * sum(map(len, batches)) / len(batches)


def plan_run(run: TrainingRun) -> RunPlan:
    """Plan a run: the forwards of a step, the conversations of each forward, and the length of the run."""
    config = run.config
    processes = run.accelerator.num_processes
    per_step = config.count_forwards(processes)
    lengths = [len(example.input_ids) for example in run.data.train]
    batches_of = partial(split_epoch, lengths, config.forward_size * processes, config.seed)
    if config.batch_tokens is not None:
        batches_of = partial(pack_epoch, lengths, config.batch_tokens, processes, config.seed)
    if config.max_steps:
        steps = config.count_stage_steps(config.max_steps)
    else:
        steps = max(1, config.hyperparameters.epochs * len(batches_of(0)) // per_step)
    return RunPlan(per_step, batches_of, Clock(steps, config.stage_minutes))
