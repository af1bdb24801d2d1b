"""How far a run is: one clock, which warm-up, decay, growth and the end of the run all read.

The clock counts steps, or minutes where they end the run first; so the rates are a function of the
clock and not a scheduler of torch, which counts steps alone. A run of 100 steps, or as long:

    behind          0      0.1              0.5               1
    learning rate   rises  is highest       falls             is the recipe's last rate
    draft steps     1                       all of them
"""

import math
from dataclasses import dataclass

from treespec.heads.registry import Recipe

MOST_WARM_UP = 0.1  # of the run


@dataclass(frozen=True)
class Clock:
    """total: steps after which the run ends. minutes: after which it ends; 0 is no limit."""

    total: int
    minutes: float = 0.0

    def behind(self, step: int, seconds: float) -> float:
        """The share of the run that is behind after `step` steps and `seconds`; 1 is its end."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(step / self.total, by_time))

    def steps(self, step: int, seconds: float) -> float:
        """Steps that the run will have made at its end, at the pace so far."""
        behind = self.behind(step, seconds)
        return step / behind if step and behind > step / self.total else self.total


def learning_rate(recipe: Recipe, clock: Clock, step: int, seconds: float) -> float:
    """The rate of the step after `step` steps and `seconds`.

    It rises in a line over the warm-up, at most a tenth of the run, and then falls as the recipe
    says.
    """
    steps = clock.steps(step, seconds)
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
