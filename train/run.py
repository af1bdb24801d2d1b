"""Training a head from the checks to the saved head and its calibration."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch import Tensor, nn

from treespec.api.calibrate import calibrate
from treespec.draft.calibration import save_calibration
from treespec.draft.vocabulary import restrict
from treespec.errors import InputError
from treespec.files.atomic import locked, remove_leftovers, write_json
from treespec.heads.checkpoint import save_head
from treespec.heads.eagle import EagleHead
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.model.weights import dtype_of_file
from treespec.text.encoding import Example
from treespec.train.checks import check
from treespec.train.config import SAVED, TrainConfig
from treespec.train.data.prepare import draft_vocabulary, law_tokens, prepare, read
from treespec.train.files.checkpoints import latest_step
from treespec.train.files.record import (
    Record,
    Validation,
    begun,
    finished,
    keep,
    record_of,
    write_card,
)
from treespec.train.loop.run import Run, check_weights
from treespec.train.loop.steps import fit
from treespec.train.loop.validate import Watch, take_best, validation
from treespec.train.machine import load_target, make_accelerator, precision_of, start_tracker, whole
from treespec.train.start import drop_out, fit_feature, moved, start_from, untrained

UNWRITABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR),
}


def train(config: TrainConfig, after_step: Callable[[int], None] = lambda step: None) -> Validation:
    """Train, and leave a head directory in config.out. A run that was killed goes on where it was.

    after_step is called with the number of finished optimizer steps. Raises InputError for what
    cannot be used, for a run that diverges, and where there is no room: the last checkpoint stays.
    """
    # 1. what needs no weights is checked before they are loaded
    check(config)
    folder = Path(config.out) / "training"
    before = begun(folder)
    if before and config.mixed_precision is None:  # the default differs by machine
        config = replace(config, mixed_precision=before["mixed_precision"])
    config = replace(config, mixed_precision=precision_of(config))
    accelerator = make_accelerator(config)
    record = record_of(config)
    if done := finished(folder, before, record):
        accelerator.print(f"{config.out} holds this head already: {done}")
        return done
    examples = read(config, record["contents"], accelerator)

    # 2. the main process holds the folder until the head is there
    with (
        locked(folder) if accelerator.is_main_process else nullcontext(),
        no_room_is_one_line(config.out),
    ):
        if accelerator.is_main_process:
            remove_leftovers(config.out)
        start_tracker(config, accelerator)
        return trained(config, record, accelerator, examples, after_step)


def trained(
    config: TrainConfig,
    record: Record,
    accelerator: Accelerator,
    examples: list[Example],
    after_step: Callable[[int], None],
) -> Validation:
    """Load the target, train, and save the head with its calibration and result."""
    # 1. target, untrained head and data
    set_seed(config.seed)
    target = load_target(config, accelerator, ends=config.features is not None)
    head = moved(untrained(config, target), target.output_device)
    data = prepare(config, target, head.taps, examples, accelerator)
    if config.first_weights == "fitted" and latest_step(Path(config.out) / "training") is None:
        fit_feature(cast(EagleHead, head), data, config.seed)
    vocabulary = draft_vocabulary(config, target, head, data, accelerator)
    if config.from_head is not None:
        start_from(config.from_head, head)
    if config.freeze_output:
        cast(nn.Module, head).get_submodule("lm_head").requires_grad_(False)
    recipe = config.recipe
    drop_out(head, recipe.dropout)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in head.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        betas=(config.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
    )
    # the head stays beside the features, also where a target is spread over several devices
    model, optimizer = accelerator.prepare(head, optimizer, device_placement=[False, False])
    stored = stored_dtype(config, target)
    tokens = law_tokens(config, target, data, vocabulary)
    run = Run(config, record, accelerator, target, data, model, optimizer, stored, tokens)

    # 2. all steps that are left
    watch, last = fit(run, after_step)

    # 3. the head as it will be served, without what mixed precision wraps around its forward
    accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    check_weights(run.served(), f"the head in {target.dtype}", run.folder)
    with whole(target, config, accelerator, "validate and calibrate the head") as target:
        result = finish(replace(run, target=target), watch, last, vocabulary)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.print(str(result))
    return result


def finish(run: Run, watch: Watch, last: int, vocabulary: Tensor | None) -> Validation:
    """Validate the head, and save it with its calibration and its card.

    last: its step. vocabulary: what restricts it when it drafts.
    """
    # 1. The last head, or the best one.
    config, accelerator, target, data = run.config, run.accelerator, run.target, run.data
    served, result = run.served(), validation(run)
    watch.compare(run, last, result)
    if config.patience and watch.best_step not in (0, last):
        accelerator.wait_for_everyone()
        take_best(run)
        accelerator.print(f"the best head is that of step {watch.best_step}: it is saved")
        served, result = run.served(), validation(run)
    accelerator.log(result.figures(), step=last)

    # 2. It is saved.
    if accelerator.is_main_process:
        save_head(run.head, config.out, run.stored, leave_out=served.optional)
    if vocabulary is not None:
        restrict(served, target, vocabulary)
    calibrates = accelerator.is_main_process or config.shard_target  # all gather its weights
    if config.calibrate and data.held_out and calibrates:
        save_calibration_of(served, run)
    if accelerator.is_main_process:
        keep(run.folder, run.record)
        write_card(config, data.counts, result)
        write_json(run.folder / "result.json", asdict(result))
    return result


@contextmanager
def no_room_is_one_line(out: str) -> Iterator[None]:
    """Inside the block a file that cannot be written raises InputError."""
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"cannot write into {out}: {error}") from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise InputError(f"cannot write into {out}: {error.strerror}") from error


def stored_dtype(config: TrainConfig, target: Target) -> torch.dtype:
    """The dtype of the head's file: as chosen, or the narrower one of the target and its file."""
    if config.save_dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.save_dtype))
    written = dtype_of_file(config.target, config.placement)
    file = getattr(torch, written) if written in SAVED[1:] else target.dtype
    return file if target.dtype == torch.float32 else target.dtype


def save_calibration_of(head: Head, run: Run) -> None:
    """Save the head's calibration, or say why there is none."""
    try:
        calibration = calibrate(head, run.target, list(run.held_out()), seed=run.config.seed)
        if run.accelerator.is_main_process:
            save_calibration(calibration, Path(run.config.out))
    except InputError as error:
        run.accelerator.print(
            f"no calibration, --tree sampled will need treespec calibrate: {error}"
        )
