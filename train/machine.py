"""What a run computes with: accelerate, its tracker, and the target.

The target is loaded whole, or its embedding and output alone where features are stored:

    prepare     whole, if features are missing; then it goes
    steps       embedding and output
    validate    whole; then it goes

or its layers are split over the processes of a run (FSDP2, `fully_shard`). A forward gathers one
layer after another, uses it and drops it, so all processes must make the same number of forwards:

    process 0   layer 1: ▮▯  layer 2: ▮▯      gathers ▮▮ of layer 1, then ▮▮ of layer 2
    process 1   layer 1: ▯▮  layer 2: ▯▮      at the same time, for other conversations

Embedding, final norm and output path stay whole in each process: the head and its loss use them
beside the forward.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from treespec.errors import InputError, first_line
from treespec.model.quantised import is_plain_weight
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_ends
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
    precision = config.mixed_precision
    try:
        return Accelerator(
            mixed_precision=precision, log_with=config.tracker, project_dir=config.out
        )
    except ValueError as error:
        raise InputError(f"--mixed-precision {precision}: {first_line(error)}") from error


def start_tracker(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises InputError where the tracker does not start, for want of a login for example."""
    if not config.tracker:
        return
    options = {name: str(value) for name, value in asdict(config).items()}
    try:
        accelerator.init_trackers("treespec", config=options)
    except Exception as error:  # each tracker raises its own
        raise InputError(
            f"--tracker {config.tracker} does not start: {first_line(error)}"
        ) from error


def load_target(config: TrainConfig, accelerator: Accelerator, ends: bool = False) -> Target:
    """The target of a run. ends: embedding and output alone, where it can be loaded like that."""
    # 1. The ends.
    on_device = {"": accelerator.device} if accelerator.device.type != "cpu" else None
    placement: Any = config.device_map or on_device
    how = replace(config.placement, device_map=placement)
    if ends:
        path = os.path.expanduser(config.target)
        model = load_ends(path, how)
        if model is not None:
            return Target(model, load_tokenizer(path, how), ends=True)

    # 2. All of it, or this process's share.
    device_map = "cpu" if config.shard_target else placement
    target = Target.load(config.target, how, device_map=device_map)
    if config.shard_target:
        shard(target, accelerator.num_processes, accelerator.device)
        accelerator.print(share_of(target))
    return target


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


def shard(target: Target, processes: int, device: torch.device) -> None:
    """Split the layers over all processes, in place, and move what stays whole to the device.

    Raises InputError for one process, and for a target that is spread over devices already.
    """
    if processes == 1:
        raise InputError("--shard-target splits the target over processes: start several of them")
    if not all(map(is_plain_weight, target.model.parameters())):
        raise InputError(
            "--shard-target splits plain weights, and this target's are quantised: leave it out, or "
            "train on the plain model"
        )
    if target.output_device.type != "cpu":
        raise InputError("--shard-target places the target itself: leave --device-map out")
    mesh = init_device_mesh(device.type, (processes,))
    for layer in target.stack:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    target.model.to(device)
    target.device = target.output_device = device


def share_of(target: Target) -> str:
    """How much of a sharded target's weights this process holds."""
    weights = list(target.model.parameters())
    here = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    held, whole = (sum(weight.nbytes for weight in some) / 2**20 for some in (here, weights))
    return f"target: {held:,.3f} of {whole:,.3f} MiB in each process"
