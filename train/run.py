"""Train a head: from the checks of the options to the saved head with its calibration and card."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate.utils import set_seed

from treespec.api.calibrate import calibrate
from treespec.draft.calibration import save_calibration
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.files.atomic import locked, remove_leftovers, write_json
from treespec.heads.checkpoint import save_head
from treespec.train.checkpoints import Place
from treespec.train.config import TrainConfig, check_folders
from treespec.train.data.prepare import prepare, read_examples
from treespec.train.loop.run import (
    DRAFT_STEPS,
    TrainingRun,
    check_head_weights,
    validate,
    validate_head,
)
from treespec.train.loop.steps import run_training_steps
from treespec.train.machine import (
    choose_precision,
    load_target,
    make_accelerator,
    start_tracker,
    whole,
)
from treespec.train.record import (
    Validation,
    keep_sample,
    load_finished_result,
    record_of,
    write_card,
)
from treespec.train.start import build_untrained_head, start_head


def train(config: TrainConfig, after_step: Callable[[int], None] = lambda step: None) -> Validation:
    """Train a head, and write its directory to config.out. A killed run continues from its last checkpoint.

    Args:
        config: the options.
        after_step: called after each optimizer step with the number of finished steps.

    Returns:
        The validation of the head.

    Raises:
        InputError: for options, data or a target that cannot be used, for a run that diverges, and for a
            full disk. The last checkpoint is kept.
    """
    # 1. Checks that need no weights come before loading them.
    check_folders(config)
    folder = Path(config.out) / "training"
    config = replace(config, mixed_precision=choose_precision(config))
    accelerator = make_accelerator(config)
    processes = accelerator.num_processes
    accelerator.print(
        f"processes: {processes}, on {accelerator.device}, mixed precision: {config.mixed_precision}"
    )
    record = record_of(config, processes)
    finished = load_finished_result(folder, record)
    if finished:
        accelerator.print(f"{config.out} holds this head already: {finished}")
        return finished
    examples = read_examples(config, accelerator)

    # 2. The main process locks the folder until the head is written.
    folder_lock: AbstractContextManager[object] = nullcontext()
    if accelerator.is_main_process:
        folder_lock = locked(folder)
    with folder_lock:
        if accelerator.is_main_process:
            remove_leftovers(config.out)
        start_tracker(config, accelerator)

        # 3. Build target, head, data and optimizer.
        set_seed(config.seed)
        target = load_target(config, accelerator, ends=config.features is not None)
        head = build_untrained_head(config, target)
        data = prepare(config, target, head.aux_layers, examples, accelerator)
        if accelerator.is_main_process:
            keep_sample(config.out, data)
        vocabulary = start_head(config, target, head, data, accelerator)
        recipe = config.recipe
        optimizer = torch.optim.AdamW(
            [parameter for parameter in head.parameters() if parameter.requires_grad],
            lr=recipe.learning_rate,
            betas=(0.9, recipe.beta2),
            weight_decay=recipe.weight_decay,
        )
        # The head stays on the device of the features, also if the target is spread over several devices.
        model, optimizer = accelerator.prepare(head, optimizer, device_placement=[False, False])
        run = TrainingRun(config, record, accelerator, target, data, model, optimizer, vocabulary)

        # 4. Run the remaining steps.
        place = run_training_steps(run, after_step)

        # 5. Validate and save the head as it will be served, without mixed precision's wrapper of its forward.
        accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        with whole(target, config, accelerator, "validate and calibrate the head") as target:
            result = finish(replace(run, target=target), place)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        accelerator.print(str(result))
        return result


def finish(run: TrainingRun, place: Place) -> Validation:
    """Validate the head, and save it with its calibration and its card. place: where the run ended."""
    config = run.config
    accelerator = run.accelerator
    data = run.data
    out = Path(run.config.out)
    served = run.copy_as_served()
    check_head_weights(served, f"the head in {run.target.dtype}", run.folder)
    result = validate_head(run)
    training_validation = validate(
        served, run.target, run.iterate_validation_rows(data.train), DRAFT_STEPS
    )
    result = replace(result, trained=training_validation.agreement)
    accelerator.log(result.to_figures(), step=place.step)
    if accelerator.is_main_process:
        save_head(run.head, out, run.target.dtype, leave_out=served.optional)
        if run.vocabulary is not None:
            restrict(served, run.target, run.vocabulary)
        if config.calibrate and data.held_out:
            try:
                rows = list(run.iterate_validation_rows(data.held_out))
                save_calibration(calibrate(served, run.target, rows), out)
            except InputError as error:
                accelerator.print(f"no calibration, treespec calibrate makes one: {error}")
        write_json(run.folder / "config.json", run.record)
        write_card(config, data, place, result)
        write_json(run.folder / "result.json", asdict(result))
    return result
