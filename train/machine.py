"""What a run computes with: the precision, accelerate, and the tracker."""

import os
from dataclasses import asdict

import torch
from accelerate import Accelerator

from treespec.errors import InputError, first_line
from treespec.train.config import TrainConfig


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
