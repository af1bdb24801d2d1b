"""Checks of a server's hidden states by their values, on the first tokens of a few conversations.

output     the last state, normed or not, must lead to the server's own log-probabilities: the same model, and
           whether the server applies the final norm
layers     a column must be nearest to the state that enters its layer, by the target's first layers
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from treespec.demo.fetch import find_model_path
from treespec.engine.memory import free_memory
from treespec.errors import InputError, get_first_line
from treespec.model.support import find_decoder
from treespec.model.target import Target
from treespec.model.weights import load_first_layers, without_layers
from treespec.train.config import TrainConfig
from treespec.train.data.server import ServedStates, StateServer
from treespec.train.machine import count_weight_bytes

MAX_PROBES = 6  # conversations
PROBE_TOKENS = 48  # at most, of each; fewer for some, so that the next tokens differ
TOP_TOKENS = 5  # most likely next tokens whose log-probabilities are compared
MAX_LOGPROB_GAP = 0.5  # in nats; a logit of 30 in bfloat16 is rounded by 0.06
# Distance of a state from the target's, relative to its length; 0.01 is usual in bfloat16.
MAX_DISTANCE = 0.15
MEMORY_SHARE = 0.5  # of the free memory, for the first layers


def choose_probes(rows: Sequence[Tensor]) -> list[Tensor]:
    """Choose the beginnings of some conversations, each a token shorter than the one before."""
    probes = []
    for number, row in enumerate(rows[:MAX_PROBES]):
        probes.append(row[: max(2, min(PROBE_TOKENS, len(row) - 1) - number)])
    return probes


def check_state_width(server: StateServer, states: Tensor, target: Target) -> None:
    """Raises InputError if the states have another width than the target's."""
    if states.shape[-1] != target.feature_width:
        raise server.build_error(
            f"serves {server.model}, whose hidden states have width {states.shape[-1]}, and the target's have "
            f"{target.feature_width}: another model"
        )


@torch.no_grad()
def find_final_norm(target: Target) -> nn.Module:
    """Find the module between the last layer and the output layer, by a forward without layers.

    target: its ends. Raises InputError if there is none.
    """
    decoder = find_decoder(target.model)
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep_call(module: nn.Module, arguments: tuple, output: object) -> None:
        if arguments and isinstance(arguments[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, arguments[0], output))

    handles = [module.register_forward_hook(keep_call) for module in decoder.modules()]
    problem = "its decoder ends without one"
    try:
        tokens = torch.arange(1, 3, device=target.device)[None]
        with without_layers(target.model.config):
            hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        for module, entered, left in reversed(calls):
            changes = entered.is_floating_point() and not torch.equal(entered, left)
            if changes and torch.equal(left.view_as(hidden), hidden):
                return module
    except Exception as error:  # a model's code may fail without layers
        problem = get_first_line(error)
    finally:
        for handle in handles:
            handle.remove()
    raise InputError(
        f"--features-from needs the final norm of {type(target.model).__name__}, and treespec does not find it "
        f"({problem}): leave --features-from out"
    )


@torch.no_grad()
def is_last_state_normed(
    server: StateServer, target: Target, norm: nn.Module, answers: Sequence[ServedStates]
) -> bool:
    """Find out whether the server's last hidden states are behind the final norm.

    norm: the final norm. answers: to the probes, with log-probabilities.

    Raises InputError if neither leads to the log-probabilities that the server tells.
    """
    gap_before = 0.0
    gap_behind = 0.0
    for answer in answers:
        if not answer.logprobs:
            raise server.build_error(
                "tells no log-probabilities, which show that its model is the target"
            )
        last = answer.states[-1, -1].to(target.output_device, target.dtype)
        gap_before = max(gap_before, measure_gap(target, norm(last), answer.logprobs))
        gap_behind = max(gap_behind, measure_gap(target, last, answer.logprobs))
    gap = min(gap_before, gap_behind)
    if not gap <= MAX_LOGPROB_GAP:
        raise server.build_error(
            f"serves {server.model}, whose last hidden states do not lead to its own next tokens by the target's "
            f"output layer (log-probabilities differ by up to {gap:.1f}): another model than the target, or the "
            f"last of its layers is not {server.layers[-1]}",
            is_command=True,
        )
    return gap_behind < gap_before


def measure_gap(target: Target, hidden: Tensor, logprobs: dict[int, float]) -> float:
    """Measure the largest difference to log-probabilities; inf: they are of another vocabulary.

    hidden: [H] behind the final norm.
    """
    own = target.compute_output_logits(hidden[None])[0].float().log_softmax(-1)
    if max(logprobs) >= len(own):
        return math.inf
    gaps = [abs(float(own[token]) - value) for token, value in logprobs.items()]
    return max(gaps)


@torch.no_grad()
def check_layers(
    server: StateServer,
    config: TrainConfig,
    target: Target,
    probes: Sequence[Tensor],
    answers: Sequence[ServedStates],
    accelerator: Accelerator,
) -> None:
    """Check that the columns are the states that enter the head's aux layers, as far as memory allows.

    The target's first layers are loaded for that, into the CPU's memory, and released.

    Args:
        server: the server.
        config: the run's options.
        target: the target's ends.
        probes: the tokens [T] of each probe.
        answers: to the probes.
        accelerator: the processes; prints which layers were compared.

    Raises InputError for a column that is nearer to another layer's state.
    """
    aux_layers = server.layers[:-1]
    layers = count_loadable_layers(config, target)
    compared = [layer for layer in aux_layers if layer < layers]
    if compared:
        path = os.path.expanduser(config.target)
        placement = replace(config.placement, device_map=None)
        model = load_first_layers(path, max(compared) + 1, placement)
        if model is None:
            compared = []
        else:
            distances = measure_distances(model, len(compared), probes, answers)
            for layer, distances_of_column in zip(compared, distances, strict=True):
                check_nearest(server, layer, distances_of_column)
    lines = ["the last leads to the server's own next tokens"]
    if compared:
        lines.append(f"layers {', '.join(map(str, compared))} compared with the target's")
    rest = [layer for layer in aux_layers if layer not in compared]
    if rest:
        names = ", ".join(map(str, rest))
        lines.append(
            f"layers {names} are not compared, since the target's layers up to there do not fit half of the free "
            f"memory, or do not load alone: see that the server runs as   {server.command}"
        )
    accelerator.print(f"hidden states of {server.address}, {server.model}: {'; '.join(lines)}")


def check_nearest(server: StateServer, layer: int, distances: Tensor) -> None:
    """Raises InputError if a column is not the state that enters a layer. distances: those to all layers."""
    nearest = int(distances.argmin())
    distance = float(distances[nearest])
    if not distance <= MAX_DISTANCE:
        raise server.build_error(
            f"serves {server.model}, whose hidden states are {distance:.0%} off those that enter layer {nearest} of "
            "the target, the nearest ones: another model, or the same with other weights"
        )
    if nearest != layer:
        raise server.build_error(
            f"writes the hidden state that enters layer {nearest}, and this head reads that of layer {layer}",
            is_command=True,
        )


def measure_distances(
    model: nn.Module, columns: int, probes: Sequence[Tensor], answers: Sequence[ServedStates]
) -> Tensor:
    """Measure [columns, layers] the mean relative distance of the server's first columns to each layer's input.

    model: the target's first layers. probes, answers: as for `check_layers`.
    """
    sums = torch.zeros(1, dtype=torch.float32, device="cpu")
    for tokens, answer in zip(probes, answers, strict=True):
        output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        inputs = torch.stack(output.hidden_states[:-1])[:, 0].float()  # [layers, T, H]
        served = answer.states[:, :columns].float().transpose(0, 1)  # [columns, T, H]
        differences = (inputs - served[:, None]).norm(dim=-1)  # [columns, layers, T]
        sums = sums + (differences / inputs.norm(dim=-1).clamp_min(1e-9)).mean(-1)
    return sums / len(probes)


def count_loadable_layers(config: TrainConfig, target: Target) -> int:
    """Count the target's first layers that fit half of the free memory; 0 if the size is not known."""
    weight_bytes = count_weight_bytes(find_model_path(os.path.expanduser(config.target)))
    if not weight_bytes:
        return 0
    if target.dtype == torch.float32:  # files have 16 bits, mostly
        weight_bytes *= 2
    return int(min(target.layers, MEMORY_SHARE * free_memory() * target.layers / weight_bytes))
