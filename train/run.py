"""Train a head: from the checks of the options to the saved head with its calibration and card."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed

from treespec.files.atomic import locked, remove_leftovers
from treespec.model.target import Target
from treespec.model.weights import load_config
from treespec.text.encoding import Example
from treespec.train.budget import TrainingSize, choose_recipe, describe_recipe, keep_recipe
from treespec.train.candidates import list_stages
from treespec.train.checkpoints import Place, find_latest_step
from treespec.train.config import TrainConfig, check_folders, check_processes
from treespec.train.data.prepare import Data, prepare, read_examples
from treespec.train.finish import finish
from treespec.train.loop.plan import plan_run
from treespec.train.loop.run import TrainingRun
from treespec.train.loop.steps import run_training_steps
from treespec.train.loop.stopping import stopping_between_steps
from treespec.train.machine import (
    choose_dtype,
    choose_precision,
    end_stage,
    load_target,
    make_accelerator,
    start_tracker,
)
from treespec.train.optimizers import build_optimizer
from treespec.train.payoff import keep_cost_beside_features
from treespec.train.record import (
    Validation,
    keep_sample,
    load_finished_result,
    load_record,
    record_of,
)
from treespec.train.report import write_training_report
from treespec.train.start import build_untrained_head, start_head
from treespec.train.verdict import (
    describe_end,
    measure_length,
    warn_of_little_data,
    warn_of_rate,
)


def train(config: TrainConfig, after_step: Callable[[int], None] = lambda step: None) -> Validation:
    """Train a head, and write its directory to config.out. A killed run continues from its last checkpoint.

    Args:
        config: the options.
        after_step: called after each optimizer step with the number of finished steps, those of a first stage too.

    Returns:
        The validation of the head.

    Raises:
        InputError: for options, data or a target that cannot be used, for a run that diverges, and for a
            full disk. The last checkpoint is kept.
        KeyboardInterrupt: after Ctrl-C or SIGTERM. The step that was finished is saved.
    """
    check_folders(config)
    check_processes(config)
    config = replace(config, mixed_precision=choose_precision(config))
    accelerator = make_accelerator(config)
    *first_stages, last_stage = list_stages(config)
    earlier_steps = 0
    for stage in first_stages:
        accelerator.print(f"first stage: a head of kind {stage.head}, in {stage.out}")
        train_stage(stage, accelerator, after_step, ends=False)
        end_stage(accelerator)
        step = find_latest_step(Path(stage.out) / "training")
        assert step is not None, "a finished run has a checkpoint"
        earlier_steps = step
    result = train_stage(last_stage, accelerator, lambda step: after_step(earlier_steps + step))
    accelerator.end_training()
    return result


def train_stage(
    config: TrainConfig,
    accelerator: Accelerator,
    after_step: Callable[[int], None],
    ends: bool = True,
) -> Validation:
    """Train a head in one run, as `train`.

    Args:
        config: the options of the run.
        accelerator: the processes.
        after_step: called after each optimizer step with the number of finished steps of the run.
        ends: whether the training ends with this run. Default: True.
    """
    # 1. Checks that need no weights come before loading them. A run that goes on keeps its recipe.
    check_folders(config)
    folder = Path(config.out) / "training"
    started = time.monotonic()
    processes = accelerator.num_processes
    accelerator.print(
        f"processes: {processes}, on {accelerator.device}, mixed precision: {config.mixed_precision}"
    )
    earlier = load_record(folder)
    if earlier is not None:
        config = keep_recipe(config, earlier)
        finished = load_finished_result(folder, record_of(config, processes))
        if finished:
            accelerator.print(f"{config.out} holds this head already: {finished}")
            return finished
    examples = read_examples(config, accelerator)
    if earlier is None:
        config = replace(config, dtype=choose_dtype(config))
        config = choose_recipe(config, measure_data(config, examples, accelerator))
    record = record_of(config, processes)
    print_recipe(config, accelerator)

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
        data = prepare(
            config,
            target,
            head.aux_layers,
            examples,
            accelerator,
            partial(use_whole_target, config),
        )
        if accelerator.is_main_process:
            keep_sample(config.out, data)
        vocabulary = start_head(config, target, head, data, accelerator)
        optimizer = build_optimizer(config, head)
        # The head stays on the device of the features, also if the target is spread over several devices.
        model, optimizer = accelerator.prepare(head, optimizer, device_placement=[False, False])
        run = TrainingRun(config, record, accelerator, target, data, model, optimizer, vocabulary)

        # 4. Run the remaining steps.
        print_beginning(accelerator, data, find_latest_step(folder))
        with stopping_between_steps(accelerator) as stop:
            place = run_training_steps(run, stop, after_step, time.monotonic() - started)

        # 5. Validate and save the head as it will be served, without mixed precision's wrapper of its forward.
        accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        result = finish(run, place)
        accelerator.wait_for_everyone()
        print_validation(result, accelerator)
        if ends:
            length = measure_length(place.step, plan_run(run).step_conversations, data)
            report_end(run, place, describe_end(config, data, place, length, result), result)
        return result


def use_whole_target(config: TrainConfig, target: Target) -> None:
    """Use the whole target once its features are stored, in the main process: measure what a cycle costs."""
    if config.calibrate and not config.shard_target:
        keep_cost_beside_features(config, target)


def print_validation(result: Validation, accelerator: Accelerator) -> None:
    """Print the figures of a validation, if there are any."""
    if result.positions:
        accelerator.print(str(result))


def print_recipe(config: TrainConfig, accelerator: Accelerator) -> None:
    """Print the recipe of a run, and a warning of a learning rate that is 0 or high."""
    accelerator.print(describe_recipe(config))
    for line in warn_of_rate(config):
        accelerator.print(line)


def report_end(run: TrainingRun, place: Place, lines: list[str], result: Validation) -> None:
    """Print the lines that end a run, and write them with its plots into report.html."""
    if run.accelerator.is_main_process:
        row = {"step": place.served_step, **asdict(result)}
        write_training_report(run.folder, str(result), lines, row)
    for line in lines:
        run.accelerator.print(line)


def print_beginning(accelerator: Accelerator, data: Data, step: int | None) -> None:
    """Print from which step a run goes on, and whether it has little data. step: that of its last checkpoint."""
    if step is not None:
        accelerator.print(f"going on from step {step}")
    for line in warn_of_little_data(data):
        accelerator.print(line)


def measure_data(
    config: TrainConfig, examples: list[Example], accelerator: Accelerator
) -> TrainingSize:
    """Measure the size of a run's data and of its target."""
    model = load_config(config.target, config.placement).get_text_config()
    return TrainingSize(
        conversations=len(examples),
        tokens=sum(len(example.input_ids) for example in examples),
        vocab_size=model.vocab_size,
        on_cpu=accelerator.device.type == "cpu",
        processes=accelerator.num_processes,
        layers=getattr(model, "num_hidden_layers", 0),
    )
