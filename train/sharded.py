"""A target whose layers are split over the processes of a run (FSDP2, `fully_shard`).

Each process holds a share of every layer's weights. A forward gathers one layer after another, uses
it and drops it, so all processes must make the same number of forwards:

    process 0   layer 1: ▮▯  layer 2: ▮▯      gathers ▮▮ of layer 1, then ▮▮ of layer 2
    process 1   layer 1: ▯▮  layer 2: ▯▮      at the same time, for other conversations

Embedding, final norm and output path stay whole in each process: the head and its loss use them
beside the forward.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from treespec.errors import InputError
from treespec.model.quantised import is_plain_weight
from treespec.model.target import Target


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


def describe(target: Target) -> str:
    """How much of the target's weights this process holds."""
    weights = list(target.model.parameters())
    here = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    held, whole = (sum(weight.nbytes for weight in some) / 2**20 for some in (here, weights))
    return f"target: {held:,.3f} of {whole:,.3f} MiB in each process"
