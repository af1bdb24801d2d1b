"""What a run computes with: accelerate, its tracker, and the target.

The target is loaded whole, or its embedding and output alone where features are stored:

    prepare     whole, if features are missing; then it goes
    steps       embedding and output
    validate    whole; then it goes
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory

from treespec.errors import InputError, first_line
from treespec.kernels.processor import computes_bfloat16
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_ends
from treespec.train.config import TrainConfig


def precision_of(config: TrainConfig) -> str:
    """The mixed precision as chosen, or the one that the hardware is made for."""
    return config.mixed_precision or ("bf16" if computes_bfloat16() else "no")


def make_accelerator(config: TrainConfig) -> Accelerator:
    """With float32 products in TF32 where a GPU has it, and over gloo where there is none.

    Raises InputError for a precision that this machine does not have.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    if config.device_map:  # the head lies where the target ends, on whichever GPU that is
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        return Accelerator(
            cpu=several and not torch.accelerator.is_available(),  # torchrun does not say so
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
    options = {name: str(value) for name, value in asdict(config).items()}
    try:
        accelerator.init_trackers("treespec", config=options)
    except Exception as error:  # each tracker raises its own
        raise InputError(
            f"--tracker {config.tracker} does not start: {first_line(error)}"
        ) from error


def load_target(config: TrainConfig, accelerator: Accelerator, ends: bool = False) -> Target:
    """The target of a run. ends: embedding and output alone, where it can be loaded like that."""
    on_device = {"": accelerator.device} if accelerator.device.type != "cpu" else None
    placement: Any = config.device_map or on_device
    how = replace(config.placement, device_map=placement)
    path = os.path.expanduser(config.target)
    if ends and (model := load_ends(path, how)) is not None:
        return Target(model, load_tokenizer(path, how), ends=True)
    return Target.load(path, how)


@contextmanager
def whole(
    target: Target, config: TrainConfig, accelerator: Accelerator, purpose: str
) -> Iterator[Target]:
    """The whole target, loaded inside the block if only its ends were. purpose: said then."""
    if not target.ends:
        yield target
        return
    accelerator.print(f"loading the whole target to {purpose} …")
    loaded = load_target(config, accelerator)
    try:
        yield loaded
    finally:
        del loaded
        release_memory()
