"""A checkpoint: a head's directory with AdamW's moments beside the weights, and how far the run is.

    OUT/training/checkpoint-000500/    config.json  model.safetensors  optimizer.safetensors

Any command that takes a trained head takes it too, while the run goes on. The folder is written
under a temporary name and renamed, each file with its checksum. All else (order, noise, learning
rate) follows from the step.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from treespec.draft.vocabulary import FILE as VOCABULARY
from treespec.errors import InputError
from treespec.files.atomic import new_folder, read_json, read_tensors, write_tensors
from treespec.heads.checkpoint import save_head
from treespec.heads.head import Head

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
REMEDY = "this checkpoint is not used"


@dataclass(frozen=True)
class Place:
    """How far a run is.

    seconds: spent on training. processes: with which it began. best, best_step: the best acceptance
    length of a validation, and its step. stale: validations since.
    """

    step: int = 0
    seconds: float = 0.0
    processes: int | None = None
    best: float = 0.0
    best_step: int = 0
    stale: int = 0


def save(path: Path, head: Head, optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Replace the folder `path`. Raises InputError or HeadError where there is no room."""
    moments: dict[str, Tensor] = {}
    for name, parameter in trained(head).items():
        state = optimizer.state.get(parameter) or untouched(parameter)
        for moment in MOMENTS:
            moments[f"{moment}.{name}"] = state[moment]
    with new_folder(path) as temporary:
        save_head(head, temporary, leave_out=head.optional)
        write_tensors(temporary / OPTIMIZER, moments, {"place": json.dumps(asdict(place))})
        vocabulary = path.parent.parent / VOCABULARY
        if vocabulary.exists():
            shutil.copyfile(vocabulary, temporary / VOCABULARY)
        shutil.rmtree(path, ignore_errors=True)


def load(path: Path, head: Head, optimizer: torch.optim.Optimizer) -> Place:
    """Restore weights and moments in place. Raises InputError for a checkpoint that is damaged or
    fits another head; the head is then as it was.
    """
    # 1. What the checkpoint holds of each weight, refused where it does not fit.
    weights, moments, about = read(path)
    states: dict[str, dict[str, Tensor]] = {}
    parameters = trained(head)
    try:
        for name, parameter in parameters.items():
            state = {moment: moments[f"{moment}.{name}"] for moment in MOMENTS}
            states[name] = state
            shaped = (weights[name], state["exp_avg"], state["exp_avg_sq"])
            if any(value.shape != parameter.shape for value in shaped):
                raise ValueError(f"{name} has another shape")
            if not all(value.isfinite().all() for value in (weights[name], *state.values())):
                raise ValueError(f"{name} holds values that are not finite")
        place = Place(**about)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"checkpoint {path} cannot be read ({error}): {REMEDY}") from error

    # 2. Into the head and its optimizer.
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(weights[name])
        optimizer.state[parameter] = {
            moment: value if moment == "step" else value.to(parameter.device)
            for moment, value in states[name].items()
        }
    return place


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict]:
    """Weights by name, moments by MOMENT.NAME, and the fields of a `Place`.

    Raises InputError for damage.
    """
    try:
        read_json(path / "config.json", REMEDY)
        weights, _ = read_tensors(path / WEIGHTS, REMEDY)
        moments, about = read_tensors(path / OPTIMIZER, REMEDY)
        return weights, moments, json.loads(about["place"])
    except (KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"checkpoint {path} cannot be read ({error}): {REMEDY}") from error


def trained(head: Head) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {
        name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad
    }


def untouched(parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's moments of a parameter before its first step."""
    zeros = torch.zeros_like(parameter)
    return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": torch.zeros(())}
