"""Validations of a run: each is reported, the best head is kept, and a run may stop for want of one.

The best head is the directory OUT/training/best, for any command that takes a head.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

from treespec.draft.vocabulary import FILE as VOCABULARY
from treespec.files.atomic import new_folder, read_tensors
from treespec.heads.checkpoint import save_head
from treespec.train.checkpoint import WEIGHTS, Place, trained
from treespec.train.decoding import decoded_length, prompts_of
from treespec.train.progress import Report
from treespec.train.running import Run
from treespec.train.validate import Validation, describe, validate
from treespec.train.whole import whole

BEST = "best"


def validation(run: Run) -> Validation:
    """On held-out conversations, with the head as it will be served."""
    config, head = run.config, run.served()
    with whole(run.target, config, run.accelerator, "validate the head") as target:
        rows = replace(run, target=target).held_out()
        result = validate(head, target, rows, config.draft_steps)
        prompts = list(prompts_of(run.data.held_out, config.decode_on, target.context_length))
        if not prompts:
            return result
        decoded = decoded_length(head, target, prompts, config.draft_steps, config.decode_tokens)
        return replace(result, decoded_length=decoded)


@final
class Watch:
    """Remembers the best validation. place: what the checkpoint says of it."""

    def __init__(self, place: Place) -> None:
        self.best, self.best_step, self.stale = place.best, place.best_step, place.stale

    def look(self, run: Run, step: int, report: Report) -> None:
        """Validate after step `step`, report it, and keep the head where it is the best so far."""
        result = validation(run)
        report.write({"step": step, **asdict(result)})
        run.accelerator.print(f"step {step}: {describe(result)}")
        run.accelerator.log(figures(result), step=step)
        if not self.best_step and result.positions:
            self.best_step = step
        self.compare(run, step, result)

    def compare(self, run: Run, step: int, result: Validation) -> None:
        """Keep the head after step `step` where it is the best so far, and was not the only one.

        Heads are compared by the acceptance length that was decoded, or else predicted.
        """
        if not result.positions or not self.best_step:
            return
        value = run.agreed(result.decoded_length or result.acceptance_length)
        if value <= self.best:
            self.stale += 1
            return
        self.best, self.best_step, self.stale = value, step, 0
        if run.accelerator.is_main_process:
            save_best(run)

    def ends(self, patience: int) -> bool:
        """Whether `patience` validations in a row were no better than the best; 0 never ends."""
        return 0 < patience <= self.stale


def figures(result: Validation) -> dict[str, float]:
    """A validation as a tracker takes it: numbers by name."""
    by_step = {
        f"held_out/agreement_{step}": share for step, share in enumerate(result.agreement, start=1)
    }
    named = by_step | {"held_out/predicted_length": result.acceptance_length}
    if result.decoded_length is None:
        return named
    return named | {"held_out/decoded_length": result.decoded_length}


def save_best(run: Run) -> None:
    """Replace the best head by the present one, in float32."""
    folder, vocabulary = run.folder / BEST, Path(run.config.out) / VOCABULARY
    with new_folder(folder) as temporary:
        save_head(run.head, temporary, leave_out=run.head.optional)
        if vocabulary.exists():
            shutil.copyfile(vocabulary, temporary / VOCABULARY)
        shutil.rmtree(folder, ignore_errors=True)


def take_best(run: Run) -> None:
    """Give the trained head the weights of the best one."""
    remedy = f"delete {run.folder / BEST} and leave out --patience to save the last head"
    weights, _ = read_tensors(run.folder / BEST / WEIGHTS, remedy)
    for name, parameter in trained(run.head).items():
        parameter.data.copy_(weights[name])
