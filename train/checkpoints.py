"""The checkpoints of a run in OUT/training: the last two, of which the later intact one is used.

A checkpoint is a head's directory with AdamW's moments beside the weights, and how far the run is:

    OUT/training/checkpoint-000500/    config.json  model.safetensors  optimizer.safetensors

Any command that takes a trained head takes it too, while the run goes on. The folder is written
under a temporary name and renamed, each file with its checksum. All else (order, noise, learning
rate) follows from the step.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from treespec.draft.vocabulary import FILE as VOCABULARY
from treespec.errors import InputError
from treespec.files.atomic import read_json, read_tensors, write_tensors, writing
from treespec.heads.checkpoint import save_head
from treespec.heads.head import Head

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
REMEDY = "this checkpoint is not used"
KEPT = 2


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
    paths = folder.glob("checkpoint-*")
    return sorted(((int(path.name.partition("-")[2]), path) for path in paths), reverse=True)


def latest_step(folder: Path) -> int | None:
    """Steps of the latest checkpoint; None where there is none."""
    return next((step for step, _ in all_in(folder)), None)


def trained(head: Head) -> dict[str, nn.Parameter]:
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


def save(folder: Path, head: Head, optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Write the checkpoint of a step; keep it and the one before.

    Later ones are of a run that was gone back on: they go too. folder: OUT/training. Raises
    InputError where there is no room.
    """
    # 1. The new one.
    moments = {
        f"{number}.{moment}": value
        for number, state in optimizer.state_dict()["state"].items()
        for moment, value in state.items()
    }
    path = folder / f"checkpoint-{place.step:06d}"
    with replacing(path, head, folder.parent) as temporary:
        write_tensors(temporary / OPTIMIZER, moments, {"place": json.dumps(asdict(place))})

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
    """Restore weights and moments in place. Raises InputError for a checkpoint that is damaged; the
    head is then as it was.
    """
    read_json(path / "config.json", REMEDY)
    moments, about = read_tensors(path / OPTIMIZER, REMEDY)
    take_weights(path, head, REMEDY)
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, value in moments.items():
        number, _, moment = name.partition(".")
        states[int(number)][moment] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    return Place(**json.loads(about["place"]))


@torch.no_grad()
def take_weights(folder: Path, head: Head, remedy: str) -> None:
    """Give a head the weights of another one of its shapes. remedy: for a damaged file."""
    weights, _ = read_tensors(folder / WEIGHTS, remedy)
    for name, parameter in trained(head).items():
        parameter.copy_(weights[name])
