"""The target's features: as training goes, or stored once in safetensors shards.

F values a position: what the head taps, with the last hidden state behind it, or that alone.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.target import Target
from treespec.train.batches import padded

SHARD = 256  # conversations a file


@final
class LiveFeatures:
    """Computed by the target for each batch."""

    def __init__(self, target: Target, rows: Sequence[Tensor], taps: tuple[int, ...] = ()) -> None:
        self.target, self.rows, self.taps = target, rows, taps

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded."""
        return self.target.features(padded([self.rows[i] for i in numbers]), self.taps, last=True)


@final
class StoredFeatures:
    """Read from shards: `features-00000.safetensors` holds conversation i under the name "i"."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded."""
        return padded([self._row(i) for i in numbers]).to(self.device)

    def _row(self, i: int) -> Tensor:
        with safe_open(shard_file(self.folder, i // SHARD), framework="pt") as file:
            return file.get_tensor(str(i))


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def stored_size(target: Target, rows: Sequence[Tensor], taps: tuple[int, ...]) -> int:
    """Bytes that the features of these conversations take."""
    width = target.feature_width + len(taps) * target.config.hidden_size
    return sum(map(len, rows)) * width * target.dtype.itemsize


def prepare_folder(folder: Path, identity: dict[str, object], needed: int) -> None:
    """Make the folder, or check that it holds features of the same target and data.

    identity: what the features depend on. needed: bytes. Raises InputError if they do not belong together or
    the disk has no room.
    """
    index = folder / "index.json"
    if index.exists():
        if json.loads(index.read_text()) != identity:
            raise InputError(f"{folder} holds features of another target or data; name another --features folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the features need {needed / 2**30:.2f} GiB, {folder} has {free / 2**30:.2f} GiB free; "
            "leave out --features to compute them as training goes"
        )
    temporary = folder / f".index-{os.getpid()}"
    temporary.write_text(json.dumps(identity, indent=2))
    os.replace(temporary, index)


def write_shard(
    target: Target, rows: Sequence[Tensor], taps: tuple[int, ...], folder: Path, number: int, batch_size: int
) -> None:
    """Store one shard, under a temporary name first. A shard that stands is not written again."""
    file = shard_file(folder, number)
    if file.exists():
        return
    numbers = range(number * SHARD, min((number + 1) * SHARD, len(rows)))
    ordered = sorted(numbers, key=lambda i: len(rows[i]))
    tensors: dict[str, Tensor] = {}
    for start in range(0, len(ordered), batch_size):
        some = ordered[start : start + batch_size]
        features = target.features(padded([rows[i] for i in some]), taps, last=True).cpu()
        tensors |= {str(i): row[: len(rows[i])].clone() for i, row in zip(some, features, strict=True)}
    temporary = file.with_suffix(f".tmp-{os.getpid()}")
    try:
        save_file(tensors, temporary)
        os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"cannot store features in {folder}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
