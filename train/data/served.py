"""Features that a server computes: its hidden states, checked by value, with the final norm applied here.

server      [T, L, H]    states that enter the head's aux layers, then the last one before the norm
features    [T, F]       the same side by side, the last one behind the norm
"""

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.server import connect
from treespec.train.data.server_checks import (
    TOP_TOKENS,
    check_layers,
    check_state_width,
    choose_probes,
    find_final_norm,
    is_last_state_normed,
)


def serve_features(
    config: TrainConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    rows: Sequence[Tensor],
    accelerator: Accelerator,
) -> Callable[[Sequence[Tensor], Sequence[int]], Iterator[tuple[str, Tensor]]]:
    """Connect to the server of --features-from, check its hidden states, and make the source of features.

    Args:
        config: the run's options.
        target: the target's ends.
        aux_layers: the target layers whose inputs the head reads.
        rows: the tokens [T] of conversations; the first ones are used for checks.
        accelerator: the processes. The main one compares layers.

    Raises InputError if the server does not answer, or serves other states than the target's.
    """
    # 1. The server.
    if not target.ends:
        raise InputError(
            f"--features-from is for a target whose embedding and output load without its layers; those of "
            f"{config.target} do not"
        )
    path = find_model_path(os.path.expanduser(config.target))
    layers = tuple(sorted({*aux_layers, target.layers}))
    server = connect(str(config.features_from), path, layers)
    columns = [layers.index(layer) for layer in aux_layers]

    # 2. The checks.
    norm = find_final_norm(target)
    probes = choose_probes(rows)
    answers = []
    for probe in probes:
        answer = server.request_states(probe, TOP_TOKENS)
        check_state_width(server, answer.states, target)
        answers.append(answer)
    is_normed = is_last_state_normed(server, target, norm, answers)
    if accelerator.is_main_process:
        check_layers(server, config, target, probes, answers, accelerator)

    # 3. The source.
    def compute(rows: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        for number, states in server.iterate_states(rows, numbers):
            yield str(number), build_features(target, norm, states, columns, is_normed)

    return compute


@torch.no_grad()
def build_features(
    target: Target, norm: nn.Module, states: Tensor, columns: Sequence[int], is_normed: bool
) -> Tensor:
    """Build features [T, F] of the target's dtype from a server's states [T, L, H].

    Args:
        target: the target's ends.
        norm: the final norm.
        states: the server's.
        columns: those of the head's aux layers.
        is_normed: whether the server has applied the norm.
    """
    last = states[:, -1].to(target.output_device, target.dtype)
    if not is_normed:
        last = norm(last)
    aux = states[:, columns].flatten(1).to(target.dtype)
    return torch.cat([aux, last.cpu()], dim=1)
