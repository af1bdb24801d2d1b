"""Validations during a run: the best head so far is kept, OUT gets it, and a run that gets no better may end.

All validations of a run read the same held-out conversations; their number keeps a validation within a small share of
the run's time. Heads are compared by the acceptance length that is predicted along them. The best head lies in
OUT/training/best, a directory that any command accepts as a head.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.utils import broadcast

from treespec.files.atomic import read_tensors
from treespec.train.candidates import add_recall
from treespec.train.checkpoints import Place, replacing, take_weights
from treespec.train.config import TrainConfig
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import DRAFT_STEPS, TrainingRun, ValidationRow, keep_rows, validate
from treespec.train.progress import TimeLimit
from treespec.train.record import Validation

BEST_FOLDER = "best"
VALIDATION_SHARE = 0.2  # of the run between validations, by default
MIN_VALIDATION_STEPS = 20  # between them; a run of fewer steps is validated at its end only
VALIDATION_TIME_SHARE = 0.02  # of the run's time for one validation
MIN_VALIDATION_SECONDS = 10.0
SHARE_TOLERANCE = 1e-6  # of shares of the run


def is_validation_due(every: int | None, place: Place, progress: float) -> bool:
    """Whether to validate after a step.

    Args:
        every: --validate-every; None: at shares of the run.
        place: where the run is.
        progress: the share of the run so far, in (0, 1].
    """
    if progress == 1:  # the last head is compared with the best one, if there is one
        return place.best_step > 0
    if every is not None:
        return every > 0 and place.step % every == 0
    share = progress - place.validated_progress
    steps = place.step - place.validated_step
    return share >= VALIDATION_SHARE - SHARE_TOLERANCE and steps >= MIN_VALIDATION_STEPS


def is_patience_over(config: TrainConfig, place: Place) -> bool:
    """Whether the run ends because its last `--patience` validations brought no better head."""
    return 0 < config.patience <= place.worse


def has_run_ended(config: TrainConfig, place: Place, progress: float) -> bool:
    """Whether a run is over: by its length, or because no head gets better. progress: the share of the run so far."""
    return progress == 1 or is_patience_over(config, place)


def look(run: TrainingRun, place: Place, meter: Meter, progress: float) -> None:
    """Validate during a run, report the result, and keep the head if it is the best so far.

    All processes call it, and go by the result of the main one.
    """
    # 1. Validate and report.
    result = validate_during_run(run, place, progress)
    place.validated_step = place.step
    place.validated_progress = progress
    meter.write({"step": place.step, **asdict(result)})
    run.accelerator.log(result.to_figures(), step=place.step)
    main_length = result.acceptance_length
    if not result.positions:
        main_length = 0.0
    length = float(
        broadcast(torch.tensor(main_length, dtype=torch.float32, device=run.accelerator.device))
    )

    # 2. Keep the best head.
    comment = f"; step {place.best_step} had {place.best:.2f}"
    if not length:
        comment = ""
    if length > place.best:
        if run.accelerator.is_main_process:
            with replacing(run.folder / BEST_FOLDER, run.head, Path(run.config.out)):
                pass
        place.best = length
        place.best_step = place.step
        place.worse = 0
        comment = "; the best head so far"
    elif length:
        place.worse += 1
    run.accelerator.print(f"step {place.step}: {result}{comment}")
    if is_patience_over(run.config, place):
        run.accelerator.print(
            f"no better head in {place.worse} validations: the run ends (--patience {run.config.patience})"
        )


def validate_during_run(run: TrainingRun, place: Place, progress: float) -> Validation:
    """Validate the head as it will be served, by what is predicted along held-out conversations.

    The first validation finds how many of them its time allows; later ones read the same.
    """
    conversations = run.config.validate_on
    seconds = max(MIN_VALIDATION_SECONDS, VALIDATION_TIME_SHARE * place.seconds / progress)
    limit = TimeLimit(0.0, seconds, run.shared_clock)
    if place.validated:
        conversations = place.validated
    rows: list[ValidationRow] = []

    def is_over() -> bool:
        return not place.validated and limit.is_over(1.0)

    held_out = keep_rows(run.iterate_validation_rows(conversations, is_over), rows)
    head = run.copy_as_served()
    result = validate(head, run.target, held_out, DRAFT_STEPS)
    place.validated = len(rows)
    return add_recall(result, head, run.target, rows, DRAFT_STEPS)


def take_best_head(run: TrainingRun, place: Place) -> None:
    """Replace the weights of a run's head at its end by the best validated ones, if these are others."""
    file = run.folder / BEST_FOLDER / "model.safetensors"
    if place.served_step == place.step or not file.exists():
        return
    weights, _ = read_tensors(file, f"delete {file.parent}, and OUT gets the last head")
    take_weights(weights, run.head)
    run.accelerator.print(
        f"the head of step {place.best_step} was the best, with {place.best:.2f} tokens per step predicted: "
        f"{run.config.out} gets it"
    )
