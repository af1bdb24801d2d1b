"""The checkpoints of a run in OUT/training: the last two, of which the later intact one is used.

A checkpoint is a head's directory with AdamW's moments beside the weights, and how far the run is:

    OUT/training/checkpoint-000500/    config.json  model.safetensors  optimizer.safetensors

Any command that takes a trained head takes it too, while the run goes on. The folder is written
under a temporary name and renamed, each file with its checksum. All else (order, noise, learning
rate) follows from the step.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from treespec.draft.vocabulary import FILE as VOCABULARY
from treespec.errors import InputError
from treespec.files.atomic import read_json, read_tensors, write_tensors, writing
from treespec.heads.checkpoint import save_head
from treespec.heads.head import Head

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
REMEDY = "this checkpoint is not used"
KEPT = 2
NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Place:
    """How far a run is, which changes as it goes.

    seconds: spent on training. processes: with which it began. best, best_step: the best acceptance
    length of a validation, and its step. stale: validations since.
    """

    step: int = 0
    seconds: float = 0.0
    processes: int | None = None
    best: float = 0.0
    best_step: int = 0
    stale: int = 0


def all_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all checkpoints in OUT/training, the latest first, readable or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    numbered = [(int(match[1]), path) for path in paths if (match := NAME.fullmatch(path.name))]
    return sorted(numbered, reverse=True)


def latest_step(folder: Path) -> int | None:
    """Steps of the latest checkpoint; None where there is none."""
    return next((step for step, _ in all_in(folder)), None)


def trained(head: Head) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: value for name, value in head.named_parameters() if value.requires_grad}


def save_as(path: Path, head: Head, out: Path) -> None:
    """Replace the folder `path` by a head in float32, with what `out` holds of its vocabulary."""
    with writing(path, folder=True) as temporary:
        fill(temporary, head, out)
        shutil.rmtree(path, ignore_errors=True)


def fill(folder: Path, head: Head, out: Path) -> None:
    """Write a head and its vocabulary into a folder."""
    save_head(head, folder, leave_out=head.optional)
    if (out / VOCABULARY).exists():
        shutil.copyfile(out / VOCABULARY, folder / VOCABULARY)


def save(folder: Path, head: Head, optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Write the checkpoint of a step; keep it and the one before.

    Later ones are of a run that was gone back on: they go too. folder: OUT/training. Raises
    InputError where there is no room.
    """
    # 1. The new one.
    names = list(trained(head))
    moments = {
        f"{moment}.{names[number]}": value
        for number, state in optimizer.state_dict()["state"].items()
        for moment, value in state.items()
    }
    path = folder / f"checkpoint-{place.step:06d}"
    with writing(path, folder=True) as temporary:
        fill(temporary, head, folder.parent)
        write_tensors(temporary / OPTIMIZER, moments, {"place": json.dumps(asdict(place))})
        shutil.rmtree(path, ignore_errors=True)

    # 2. It and the one before stay.
    kept = [other for step, other in all_in(folder) if step <= place.step][:KEPT]
    for _, other in all_in(folder):
        if other not in kept:
            shutil.rmtree(other, ignore_errors=True)


def load(
    folder: Path, head: Head, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> Place:
    """Restore the latest intact checkpoint, and tell of damaged later ones.

    Without any checkpoint the run is at its beginning. Raises InputError where all are damaged.
    """
    problems: list[str] = []
    for step, path in all_in(folder):
        try:
            place = restore(path, head, optimizer)
        except InputError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"{problem}; going on from step {step}")
        return place
    if problems:
        raise InputError(f"{'; '.join(problems)}; delete {folder} to begin again")
    return Place()


def restore(path: Path, head: Head, optimizer: torch.optim.Optimizer) -> Place:
    """Restore weights and moments in place. Raises InputError for a checkpoint that is damaged or
    fits another head; the head is then as it was.
    """
    # 1. What the checkpoint holds of each weight, refused where it does not fit.
    read_json(path / "config.json", REMEDY)
    weights, _ = read_tensors(path / WEIGHTS, REMEDY)
    moments, about = read_tensors(path / OPTIMIZER, REMEDY)
    states, parameters = {}, trained(head)
    try:
        for number, (name, parameter) in enumerate(parameters.items()):
            if f"step.{name}" in moments:  # others took no part in a step yet
                states[number] = {moment: moments[f"{moment}.{name}"] for moment in MOMENTS}
            values = [weights[name], *states.get(number, {}).values()]
            if any(value.shape not in (parameter.shape, ()) for value in values):
                raise ValueError(f"{name} has another shape")
            if not all(value.isfinite().all() for value in values):
                raise ValueError(f"{name} holds values that are not finite")
        place = Place(**json.loads(about["place"]))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"checkpoint {path} cannot be read ({error}): {REMEDY}") from error

    # 2. Into the head and its optimizer.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    return place
