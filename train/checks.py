"""Checks before the target is loaded: options of the kind of head, trackers, folders."""

import os
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from treespec.errors import InputError, first_line
from treespec.options import either, nearest
from treespec.text import templates
from treespec.train.config import TrainConfig
from treespec.train.eagle3_options import EAGLE3_FLAGS, Eagle3Options
from treespec.train.kinds import TRAINING

PRECISIONS = ("no", "bf16", "fp16")
FIRST_WEIGHTS = ("random", "feature", "fitted")
SAVED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check(config: TrainConfig) -> None:
    """Raises InputError for options that cannot be used with any target and data."""
    # 1. Names.
    check_kind(config)
    check_tracker(config.tracker)
    if config.mixed_precision not in (None, *PRECISIONS):
        raise InputError(
            f"--mixed-precision is {config.mixed_precision!r}, must be no, bf16 or fp16"
        )
    if config.save_dtype not in ("auto", *SAVED):
        raise InputError(
            f"--save-dtype is {config.save_dtype!r}, must be auto, {', '.join(SAVED)}"
            f"{nearest(config.save_dtype, SAVED)}"
        )
    if config.first_weights not in FIRST_WEIGHTS:
        raise InputError(
            f"--first-weights is {config.first_weights!r}, must be {either(FIRST_WEIGHTS)}"
        )
    if config.from_head is not None and config.first_weights != "random":
        raise InputError("--from-head brings first weights: leave --first-weights out")
    if config.feature_dtype != "auto" and config.features is None:
        raise InputError("--feature-dtype is of stored features: name their folder with --features")
    if config.patience and not config.validate_every:
        raise InputError(
            f"--patience {config.patience} needs --validate-every: it counts validations"
        )
    templates.stops(config.template)  # raises for a name that fschat does not know

    # 2. Folders.
    check_folder("--out", config.out)
    if config.features is not None:
        check_folder("--features", config.features)
    out = Path(config.out)
    if (out / "model.safetensors").exists() and not (out / "training").exists():
        raise InputError(
            f"--out {out} holds a model that was not trained there: name another folder"
        )


def check_kind(config: TrainConfig) -> None:
    """Raises InputError for an option that the kind of head does not take."""
    chosen = {
        "--no-bias": not config.bias,
        "--draft-heads": config.draft_heads is not None,
        "--unrolled-steps": config.unrolled_steps is not None,
        "--grow-at": config.grow_at is not None,
        "--freeze-output": config.freeze_output,
        "--dropout": config.dropout is not None,
        "--loss-vocab": config.loss_vocab is not None,
        "--first-weights": config.first_weights != "random",
    }
    published = Eagle3Options()
    for name, flag in EAGLE3_FLAGS.items():
        chosen[flag] = getattr(config, name) != getattr(published, name)
    for flag in [flag for flag, is_chosen in chosen.items() if is_chosen]:
        if flag not in TRAINING[config.head].flags:
            able = ", ".join(name for name, training in TRAINING.items() if flag in training.flags)
            raise InputError(f"{flag} is for --head {able}: leave it out for {config.head}")


def check_tracker(name: str | None) -> None:
    """Raises InputError for a tracker that accelerate does not know, or that is not installed."""
    if name is None:
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        raise InputError(
            f"--tracker {name} is unknown, must be one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
        )
    if name not in [str(available) for available in get_available_trackers()]:
        raise InputError(
            f"--tracker {name} needs its package: pip install {name.replace('_', '-')}"
        )


def check_folder(option: str, path: str) -> None:
    """Raises InputError for a path that is no folder, and where none can be made."""
    folder = Path(path)
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from error
    if not folder.is_dir():
        raise InputError(f"{option} {path}: {folder} is a file, name a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {path}: {folder} cannot be written into, name another folder")


def precision_of(config: TrainConfig) -> str:
    """The mixed precision as chosen, or the one that the hardware is made for."""
    fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.mixed_precision or ("bf16" if fast else "no")


def make_accelerator(config: TrainConfig) -> Accelerator:
    """With float32 products in TF32 where a GPU has it.

    Raises InputError for a precision that this machine does not have.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    if config.device_map:  # the head lies where the target ends, on whichever GPU that is
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    try:
        return Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=config.tracker,
            project_dir=config.out,
        )
    except ValueError as error:
        raise InputError(
            f"--mixed-precision {config.mixed_precision}: {first_line(error)}"
        ) from error


def start_tracker(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises InputError where the tracker does not start, for want of a login for example."""
    if not config.tracker:
        return
    try:
        accelerator.init_trackers(
            "treespec", config={name: str(value) for name, value in asdict(config).items()}
        )
    except Exception as error:  # each tracker raises its own
        raise InputError(
            f"--tracker {config.tracker} does not start: {first_line(error)}"
        ) from error
