"""The checkpoints of a run in OUT/training: the last two are kept, and a run continues from the last one.

A checkpoint is a head's directory with the optimizer's moments and the run's progress beside the weights:

    OUT/training/checkpoint-000500/    config.json  model.safetensors  optimizer.safetensors

Any command that accepts a trained head accepts a checkpoint too. The folder is written under a temporary
name and renamed; each file has a checksum. Everything else (order, noise, learning rate) follows from the step.
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
    """The progress of a run.

    Attributes:
        step: finished optimizer steps.
        seconds: seconds of training so far.
        best: the best acceptance length of the validations so far.
        best_step: the step of that validation; 0: none.
        worse: validations since then.
        validated: held-out conversations of each validation; 0: none yet.
        validated_step: the step of the last validation.
        validated_progress: the share of the run at that step.
    """

    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    worse: int = 0
    validated: int = 0
    validated_step: int = 0
    validated_progress: float = 0.0

    @property
    def served_step(self) -> int:
        """The step whose head OUT gets: the best validated one, or else the last."""
        if self.best_step:
            return self.best_step
        return self.step


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List (step, path) of all checkpoints in OUT/training, the latest first."""
    checkpoints = []
    for path in folder.glob("checkpoint-*"):
        step = int(path.name.removeprefix("checkpoint-"))
        checkpoints.append((step, path))
    return sorted(checkpoints, reverse=True)


def find_latest_step(folder: Path) -> int | None:
    """Find the step of the latest checkpoint; None if there is none."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    step, _ = checkpoints[0]
    return step


def select_trained_parameters(head: Head) -> dict[str, nn.Parameter]:
    """Select the parameters that training changes, by name."""
    return {name: value for name, value in head.named_parameters() if value.requires_grad}


@contextmanager
def replacing(path: Path, head: Head, out: Path) -> Iterator[Path]:
    """Context manager: replace the folder `path` by a head in float32, with the draft vocabulary saved in `out`.

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
    """Write the checkpoint of a step, and delete all but the last two.

    Args:
        folder: OUT/training.
        head: the head, in float32.
        optimizer: the optimizer, without accelerate's wrapper.
        place: the progress of the run.

    Raises:
        InputError: if the disk is full.
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
    """Restore weights and moments from the latest checkpoint, in place, and return the run's progress.

    Without a checkpoint nothing changes, and the progress is 0. Raises InputError for a damaged checkpoint.
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
    """Copy weights into a head of the same shapes."""
    for name, parameter in select_trained_parameters(head).items():
        parameter.copy_(weights[name])
