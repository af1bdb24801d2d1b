"""Set up what a run computes with: accelerate, the tracker, and the target.

Without stored features the target stays loaded. With stored features, only its embedding and output layer do:

    prepare     the whole target, if features are missing; released afterwards
    steps       embedding and output layer
    validate    the whole target; released afterwards
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory
from transformers.utils import cached_file

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError, get_first_line
from treespec.kernels.processor import is_bfloat16_fast
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_config, load_ends
from treespec.train.config import TrainConfig
from treespec.train.sharding import load_sharded_target

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
# A target of 16 bits takes twice its files in float32; half of the memory stays free.
FLOAT32_MEMORY_FACTOR = 4


def choose_precision(config: TrainConfig) -> str:
    """The mixed precision that the user chose, or "bf16" on hardware that is fast in it, or "no"."""
    if config.mixed_precision is not None:
        return config.mixed_precision
    if is_bfloat16_fast():
        return "bf16"
    return "no"


def choose_dtype(config: TrainConfig) -> str:
    """Choose the precision of the target: float32 instead of 16 bits where the CPU has no instructions for them.

    There float32 is several times as fast. The choice of the user stays, and `auto` stays for quantised weights
    and where float32 may not fit the memory.
    """
    on_gpu = torch.accelerator.is_available() or config.device_map not in (None, "cpu")
    if config.dtype != "auto" or config.load_in is not None or on_gpu or is_bfloat16_fast():
        return config.dtype
    model = load_config(config.target, config.placement)
    half_precision = str(getattr(model, "dtype", None)) in ("torch.bfloat16", "torch.float16")
    if not half_precision or getattr(model, "quantization_config", None) is not None:
        return "auto"
    weight_bytes = count_weight_bytes(find_model_path(os.path.expanduser(config.target)))
    if weight_bytes and FLOAT32_MEMORY_FACTOR * weight_bytes < count_memory_bytes():
        return "float32"
    return "auto"


def count_weight_bytes(path: str) -> int:
    """Count the bytes of a model's safetensors files, in a directory or the hub's cache; 0 if there are none."""
    index = cached_file(path, SAFETENSORS_INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        about = json.loads(Path(index).read_text(encoding="utf-8"))
        return int(about.get("metadata", {}).get("total_size", 0))
    file = cached_file(path, SAFETENSORS_FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return 0
    return Path(file).stat().st_size


def count_memory_bytes() -> int:
    """Count the bytes of the machine's memory; 0 on systems that do not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


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


def end_stage(accelerator: Accelerator) -> None:
    """Finish the trackers of a run, and forget its model and optimizer, before the next run of the same training."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()


def load_target(config: TrainConfig, accelerator: Accelerator, ends: bool = False) -> Target:
    """Load the target of a run, or this process's part of it with --shard-target.

    ends: only its embedding and output layer, if its format allows that.
    """
    device_map: Any = config.device_map
    if not device_map and accelerator.device.type != "cpu":
        device_map = {"": accelerator.device}
    placement = replace(config.placement, device_map=device_map)
    path = os.path.expanduser(config.target)
    if ends:
        model = load_ends(path, placement)
        if model is not None:
            return Target(model, load_tokenizer(path, placement), ends=True)
    if config.shard_target:
        return load_sharded_target(path, config.placement, config.max_length, accelerator)
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
