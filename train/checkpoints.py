"""The checkpoints of a run in OUT/training: the last two are kept, and the later one is used.

A checkpoint is a head's directory with AdamW's moments beside the weights, and how far the run is:

    OUT/training/checkpoint-000500/    config.json  model.safetensors  optimizer.safetensors

Any command that takes a trained head takes it too, while the run goes on. The folder is written
under a temporary name and renamed, each file with its checksum. All else (order, noise, learning
rate) follows from the step.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from treespec.draft.vocabulary import DRAFT_VOCABULARY_FILE as VOCABULARY
from treespec.files.atomic import read_tensors, write_tensors, writing
from treespec.heads.checkpoint import save_head
from treespec.heads.head import Head

OPTIMIZER_FILE = "optimizer.safetensors"
KEPT_CHECKPOINTS = 2


@dataclass
class Place:
    """How far a run is, which changes as it goes.

    seconds: spent on training. best: the best acceptance length of a validation.
    """

    step: int = 0
    seconds: float = 0.0
    best: float = 0.0


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all checkpoints in OUT/training, the latest first."""
    checkpoints = []
    for path in folder.glob("checkpoint-*"):
        step = int(path.name.removeprefix("checkpoint-"))
        checkpoints.append((step, path))
    return sorted(checkpoints, reverse=True)


def find_latest_step(folder: Path) -> int | None:
    """Steps of the latest checkpoint; None where there is none."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    step, _ = checkpoints[0]
    return step


def select_trained_parameters(head: Head) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: value for name, value in head.named_parameters() if value.requires_grad}


@contextmanager
def replacing(path: Path, head: Head, out: Path) -> Iterator[Path]:
    """Replace the folder `path` by a head in float32, with what `out` holds of its vocabulary.

    Yields the temporary folder, for further files.
    """
    with writing(path, folder=True) as temporary:
        save_head(head, temporary, leave_out=head.optional)
        if (out / VOCABULARY).exists():
            shutil.copyfile(out / VOCABULARY, temporary / VOCABULARY)
        yield temporary
        shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(
    folder: Path, head: Head, optimizer: torch.optim.Optimizer, place: Place
) -> None:
    """Write the checkpoint of a step; keep it and the one before. folder: OUT/training.

    Raises InputError where there is no room.
    """
    moments: dict[str, Tensor] = {}
    for number, state in optimizer.state_dict()["state"].items():
        for moment, value in state.items():
            moments[f"{number}.{moment}"] = value
    path = folder / f"checkpoint-{place.step:06d}"
    with replacing(path, head, folder.parent) as temporary:
        write_tensors(temporary / OPTIMIZER_FILE, moments, {"place": json.dumps(asdict(place))})
    for _, earlier in list_checkpoints(folder)[KEPT_CHECKPOINTS:]:
        shutil.rmtree(earlier, ignore_errors=True)


def load_checkpoint(folder: Path, head: Head, optimizer: torch.optim.Optimizer) -> Place:
    """Restore weights and moments of the latest checkpoint, in place.

    Without any checkpoint the run is at its beginning. Raises InputError for a damaged one.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return Place()
    _, path = checkpoints[0]
    remedy = f"delete {path}, and the same command goes on from the checkpoint before"
    moments, about = read_tensors(path / OPTIMIZER_FILE, remedy)
    weights, _ = read_tensors(path / "model.safetensors", remedy)
    take_weights(weights, head)
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, value in moments.items():
        number, _, moment = name.partition(".")
        states[int(number)][moment] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    return Place(**json.loads(about["place"]))


@torch.no_grad()
def take_weights(weights: dict[str, Tensor], head: Head) -> None:
    """Give a head the weights of another one of its shapes."""
    for name, parameter in select_trained_parameters(head).items():
        parameter.copy_(weights[name])
