"""The frozen target divided over the processes of a run: each holds a part of every decoder layer (FSDP2).

A layer's weights are gathered for its forward and released after it. Two processes, each with texts of its own:

    process 0    embedding, norms, output layer, first half of each layer     reads texts a, b
    process 1    the same, second half of each layer                          reads texts c, d

So all processes must run equally many forwards, and none may run one alone: nothing is decoded while a run lasts.
"""

from dataclasses import replace

from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from treespec.errors import InputError, get_first_line
from treespec.model.placement import Placement
from treespec.model.support import find_decoder, find_layers, find_recurrent_layers
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_model


def load_sharded_target(
    path: str, placement: Placement, max_length: int, accelerator: Accelerator
) -> Target:
    """Load a target whose layers are divided over the processes. All of them call it.

    The processes load the model into the host's memory one after another, so that it holds one copy at a time.

    Args:
        path: a directory or hub id.
        placement: how the model is loaded, without a device map.
        max_length: tokens of the longest text.
        accelerator: the processes.

    Raises:
        InputError: the model cannot be loaded or divided, or computes a long text in two forwards.
    """
    device = accelerator.device
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    model: PreTrainedModel | None = None
    for process in range(accelerator.num_processes):
        if process == accelerator.process_index:
            model = load_model(path, replace(placement, device_map=None))
            shard_layers(model, mesh)
            model.to(device)
        accelerator.wait_for_everyone()
    assert model is not None, "each process has had its turn"
    target = Target(model, load_tokenizer(path, placement))
    target.trust_remote_code = placement.trust_remote_code
    limit = target.longest_short_text
    if limit and max_length > limit:
        raise InputError(
            f"--shard-target: the target has other rotary factors from {limit} tokens on, and computes longer texts in "
            f"two forwards: set --max-length {limit}"
        )
    part_gib = count_local_bytes(model) / 2**30
    whole_gib = sum(weight.nbytes for weight in model.parameters()) / 2**30
    accelerator.print(
        f"the target's layers are divided over {accelerator.num_processes} processes: {part_gib:.2f} of "
        f"{whole_gib:.2f} GiB in each"
    )
    return target


def shard_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the weights of a model's decoder layers over the processes, in place, and move these to the device.

    mesh: the processes, in one dimension. Raises InputError for layers that cannot be divided.
    """
    layers = model.config.get_text_config().num_hidden_layers
    decoder = find_decoder(model)
    if find_recurrent_layers(model, decoder, layers):
        raise InputError(
            f"--shard-target: {type(model).__name__} has recurrent layers, whose parts are computed one by one: leave "
            "it out"
        )
    try:
        for layer in find_layers(decoder, layers, model.device):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    except InputError:
        raise
    except (
        Exception
    ) as error:  # torch raises errors of many types for weights that it cannot divide
        raise InputError(
            f"--shard-target: {type(model).__name__} cannot be divided: {get_first_line(error)}"
        ) from error


def count_local_bytes(model: PreTrainedModel) -> int:
    """Count the bytes of a model's weights in this process."""
    total = 0
    for weight in model.parameters():
        local = weight.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        total += local.nbytes
    return total
