"""Set up what a run computes with: accelerate, the tracker, and the target.

Without stored features the target stays loaded. With stored features, only its embedding and output layer do:

    prepare     the whole target, if features are missing; released afterwards
    steps       embedding and output layer
    validate    the whole target; released afterwards
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory

from treespec.errors import InputError, get_first_line
from treespec.kernels.processor import is_bfloat16_fast
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_ends
from treespec.train.config import TrainConfig


def choose_precision(config: TrainConfig) -> str:
    """The mixed precision that the user chose, or "bf16" on hardware that is fast in it, or "no"."""
    if config.mixed_precision is not None:
        return config.mixed_precision
    if is_bfloat16_fast():
        return "bf16"
    return "no"


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Make the accelerator: TF32 for float32 products on a GPU, and gloo between processes without GPUs.

    Raises InputError for a mixed precision that this machine does not support.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    if config.device_map:  # the head is on the GPU of the target's last layer
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    on_cpu = False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun does not say that there is no GPU
        on_cpu = not torch.accelerator.is_available()
    try:
        return Accelerator(
            cpu=on_cpu,
            mixed_precision=config.mixed_precision,
            log_with=config.tracker,
            project_dir=config.out,
        )
    except ValueError as error:
        raise InputError(
            f"--mixed-precision {config.mixed_precision}: {get_first_line(error)}"
        ) from error


def start_tracker(config: TrainConfig, accelerator: Accelerator) -> None:
    """Start the tracker. Raises InputError if it does not start, for example without a login."""
    options = {name: str(value) for name, value in asdict(config).items()}
    try:
        accelerator.init_trackers("treespec", config=options)
    except Exception as error:  # each tracker raises its own
        raise InputError(
            f"--tracker {config.tracker} does not start: {get_first_line(error)}"
        ) from error


def load_target(config: TrainConfig, accelerator: Accelerator, ends: bool = False) -> Target:
    """Load the target of a run. ends: only its embedding and output layer, if its format allows that."""
    device_map: Any = config.device_map
    if not device_map and accelerator.device.type != "cpu":
        device_map = {"": accelerator.device}
    placement = replace(config.placement, device_map=device_map)
    path = os.path.expanduser(config.target)
    if ends:
        model = load_ends(path, placement)
        if model is not None:
            return Target(model, load_tokenizer(path, placement), ends=True)
    return Target.load(path, placement)


@contextmanager
def whole(
    target: Target, config: TrainConfig, accelerator: Accelerator, purpose: str
) -> Iterator[Target]:
    """Context manager: yield the whole target. If only its ends are loaded, load it for the duration of the block.

    Args:
        target: the run's target.
        config: the run's options.
        accelerator: the processes.
        purpose: printed when the target is loaded, such as "validate the head".
    """
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
