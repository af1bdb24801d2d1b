"""A loss, gradient or weight that is not finite never passes unseen.

A step with such a gradient would fill the weights with NaN. It is skipped, and the weights stay as
they were. Many skipped steps in a row end the run.
"""

from pathlib import Path
from typing import final

from accelerate import Accelerator
from torch import Tensor

from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.train.checkpoints import latest_step

# Skipped steps that end a run. Loss scaling of float16 skips up to 16 while it finds its scale.
IN_A_ROW = 20


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
            raise diverged(
                f"the loss or its gradient is not finite since step {step - IN_A_ROW + 1}",
                self.folder,
            )

    def refuse_nothing_learnt(self) -> None:
        """Raises InputError where no step of the run was a good one."""
        if self.steps and self.total == self.steps:
            raise diverged("the loss or its gradient was not finite at any step", self.folder)


def all_finite(accelerator: Accelerator, losses: Tensor, norm: Tensor | None) -> bool:
    """Whether losses and the gradient's norm are finite in all processes.

    They all step, or none does: their weights must stay the same.
    """
    total = losses if norm is None else losses + norm.to(losses.device)
    return bool(accelerator.reduce(total, reduction="sum").isfinite().all())


def check_weights(head: Head, what: str, folder: Path) -> None:
    """Raises InputError for weights that are not finite. what: whose weights they are."""
    if any(not value.isfinite().all() for value in head.state_dict().values()):
        raise diverged(f"the weights of {what} are not finite", folder)


def diverged(what: str, folder: Path) -> InputError:
    """The error of a run that cannot go on. It says which checkpoint is left."""
    step = latest_step(folder)
    kept = (
        "no checkpoint was written"
        if step is None
        else f"the checkpoint of step {step} is kept in {folder}"
    )
    return InputError(
        f"{what}; {kept}. Lower --learning-rate, or look at the loss's options and the target's --dtype"
    )
