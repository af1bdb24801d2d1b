"""The checkpoints of a run in OUT/training: the last two, of which the later intact one is used."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.train import checkpoint
from treespec.train.checkpoint import Place

KEPT = 2
NAME = re.compile(r"checkpoint-(\d+)")


def path_of(folder: Path, step: int) -> Path:
    """folder: OUT/training."""
    return folder / f"checkpoint-{step:06d}"


def all_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all checkpoints, the latest first, whether they can be read or not."""
    numbered = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := NAME.fullmatch(path.name))
    ]
    return sorted(numbered, reverse=True)


def latest_step(folder: Path) -> int | None:
    """Steps of the latest checkpoint; None where there is none."""
    return next((step for step, _ in all_in(folder)), None)


def save(folder: Path, head: Head, optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Write the checkpoint of a step; keep it and the one before. Raises as `checkpoint.save`.

    Later ones are of a run that was gone back on: they go too.
    """
    checkpoint.save(path_of(folder, place.step), head, optimizer, place)
    before = [(step, path) for step, path in all_in(folder) if step < place.step]
    kept = {path_of(folder, place.step), *(path for _, path in before[: KEPT - 1])}
    for _, path in all_in(folder):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def load(
    folder: Path, head: Head, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> Place:
    """Restore the latest intact checkpoint, and tell of damaged later ones.

    Without any checkpoint the run is at its beginning. Raises InputError where all are damaged.
    """
    problems: list[str] = []
    for step, path in all_in(folder):
        try:
            place = checkpoint.load(path, head, optimizer)
        except InputError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"{problem}; going on from step {step}")
        return place
    if problems:
        raise InputError(f"{'; '.join(problems)}; delete {folder} to begin anew")
    return Place()
