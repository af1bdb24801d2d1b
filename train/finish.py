"""The end of a run: the head is written first, then measured and calibrated in a tenth of the run's time."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from treespec.api.calibrate import calibrate
from treespec.draft.calibration import save_calibration
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.files.atomic import write_json
from treespec.heads.checkpoint import save_head
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.checkpoints import Place
from treespec.train.loop.best import take_best_head
from treespec.train.loop.run import (
    DRAFT_STEPS,
    TRAINED_TIME_SHARE,
    TrainingRun,
    ValidationRow,
    check_head_weights,
    validate,
    validate_head,
)
from treespec.train.machine import whole
from treespec.train.payoff import describe_payoff, find_cost
from treespec.train.progress import TimeLimit, format_seconds
from treespec.train.record import NOT_VALIDATED, Validation, write_card


def finish(run: TrainingRun, place: Place) -> Validation:
    """Write the best head, then validate and calibrate it, and write its card. place: where the run ended.

    With stored features the whole target is loaded only if `--decode-on` says so.
    """
    config = run.config
    accelerator = run.accelerator
    take_best_head(run, place)
    served = run.copy_as_served()
    check_head_weights(served, f"the head in {run.target.dtype}", run.folder)
    limit = TimeLimit(place.seconds, accelerator=run.shared_clock)
    if accelerator.is_main_process:
        save_head(run.head, Path(config.out), run.target.dtype, leave_out=served.optional)
        write_json(run.folder / "config.json", run.record)
        write_card(config, run.data, place, NOT_VALIDATED)
    accelerator.print(
        f"{config.out} has the head; validation and calibration take at most {format_seconds(limit.seconds)}"
    )
    needs_whole = run.data.held_out_features is None and not config.shard_target
    if not needs_whole and not config.decoded_prompts:
        return measure_head(run, served, place, limit)
    with whole(run.target, config, accelerator, "validate and calibrate the head") as target:
        return measure_head(replace(run, target=target), served, place, limit)


def measure_head(run: TrainingRun, served: Head, place: Place, limit: TimeLimit) -> Validation:
    """Validate and calibrate the head, and write its card and the result.

    Args:
        run: the run, with the whole target, or with its ends and stored features.
        served: the head as it will be served.
        place: where the run ended.
        limit: the time for it.
    """
    # 1. Validate on held-out conversations, and on some that the head was trained on.
    config = run.config
    accelerator = run.accelerator
    rows: list[ValidationRow] = []
    result = validate_head(run, limit, rows)
    trained = validate(served, run.target, iterate_trained_rows(run, limit), DRAFT_STEPS)
    result = replace(result, trained=trained.agreement)
    accelerator.log(result.to_figures(), step=place.step)

    # 2. Calibrate, and write the figures.
    if accelerator.is_main_process:
        target = run.target
        if config.shard_target:
            target = Target(target.model, target.tokenizer, ends=True)  # its layers do not run here
        if run.vocabulary is not None:
            restrict(served, target, run.vocabulary)
        if config.calibrate and run.data.held_out:
            seconds = limit.count_remaining()
            extent = "on one conversation, as validation took the time"
            if seconds:
                extent = f"at most {format_seconds(seconds)}"
            accelerator.print(f"calibrating the head for --tree auto, {extent} …")
            try:
                save_calibration(calibrate(served, target, rows, seconds=seconds), Path(config.out))
            except InputError as error:
                accelerator.print(f"no calibration, treespec calibrate makes one: {error}")
            payoff = describe_payoff(find_cost(config, served, target), result)
            if payoff:
                accelerator.print(payoff)
        write_card(config, run.data, place, result)
        write_json(run.folder / "result.json", asdict(result))
    return result


def iterate_trained_rows(run: TrainingRun, limit: TimeLimit) -> Iterator[ValidationRow]:
    """Yield conversations that the head was trained on, with the target's features, at most `--validate-on`."""
    examples = run.data.train[: run.config.validate_on]
    for number, example in enumerate(examples):
        if number and limit.is_over(TRAINED_TIME_SHARE):
            return
        features = run.data.features([number])[0].to(run.target.output_device)
        tokens = example.input_ids.to(features.device)
        yield ValidationRow(tokens, example.loss_mask.to(tokens.device), features)
