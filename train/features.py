"""The target's features: as training goes, or stored once in safetensors shards.

F values a position: what the head taps, with the last hidden state behind it, or that alone.
A thread reads the rows of the next batch, and no other of their shards, while a step computes.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json, writing
from treespec.heads import checksum
from treespec.model.target import Target
from treespec.train.batches import padded
from treespec.train.eight_bits import bytes_of, packed, unpacked

Identity = dict[str, Any]  # what the features depend on, as the index holds it

SHARD = 256  # conversations a file
FORMAT = 1
INDEX = "index.json"
AHEAD = 4  # batches read before they are asked for
OWNER = "features"  # metadata of a shard: the digest of the index that it belongs to


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
    """Read from shards: `features-00000.safetensors` holds conversation i under the name "i".

    identity: what the features depend on. A shard's metadata holds a checksum for each of its
    conversations, which is verified when the conversation is first read. In 8 bits a conversation
    has its scales beside it, under the name "i.scales".
    """

    def __init__(self, folder: Path, identity: Identity, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.owner = checksum.of_fields(identity)
        self.eight_bits = "eight_bits" in identity
        self.dtype: torch.dtype = getattr(torch, str(identity["dtype"]).removeprefix("torch."))
        self.verified: set[int] = set()
        self.shards: dict[int, tuple[Any, dict[str, str]]] = {}  # open files and their metadata
        self.reader = ThreadPoolExecutor(1, "features")
        self.ahead: dict[tuple[int, ...], Future[Tensor]] = {}

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded. Raises InputError for a damaged shard."""
        waiting = self.ahead.pop(tuple(numbers), None) or self._begin(numbers)
        return waiting.result().to(self.device)

    def expect(self, numbers: Sequence[int]) -> None:
        """Begin to read what `batch` will be asked for."""
        while len(self.ahead) >= AHEAD:
            self.ahead.pop(next(iter(self.ahead))).cancel()
        self.ahead[tuple(numbers)] = self._begin(numbers)

    def holds(self, number: int) -> bool:
        """Whether a shard is there. Raises InputError for one of other features."""
        file = shard_file(self.folder, number)
        if not file.exists():
            return False
        with readable(file), safe_open(file, framework="pt") as shard:
            owner = (shard.metadata() or {}).get(OWNER)
        if owner != self.owner:
            raise InputError(
                f"{file} holds features of another target or data: delete {self.folder} to store them anew"
            )
        return True

    def stored(self, features: Tensor, number: int) -> dict[str, Tensor]:
        """The tensors that a shard holds of conversation `number`. features: [T, F]."""
        if not self.eight_bits:
            return {str(number): features}
        values, scales = packed(features)
        return {str(number): values, f"{number}.scales": scales}

    def _begin(self, numbers: Sequence[int]) -> "Future[Tensor]":
        return self.reader.submit(lambda: padded([self._row(i) for i in numbers]))

    def _row(self, i: int) -> Tensor:
        """[T, F] features of a conversation, of whose shard no other is read."""
        # 1. Its tensors.
        number = i // SHARD
        file = shard_file(self.folder, number)
        with readable(file):
            if number not in self.shards:
                shard = safe_open(file, framework="pt")
                self.shards[number] = shard, shard.metadata() or {}
            shard, about = self.shards[number]
            names = [str(i)] if not self.eight_bits else [str(i), f"{i}.scales"]
            tensors = {name: shard.get_tensor(name) for name in names}

        # 2. Their checksum.
        if i not in self.verified:
            if about.get(str(i)) != checksum.of_tensors(tensors, {}):
                raise InputError(f"{file} is damaged, a checksum does not match: {remedy(file)}")
            self.verified.add(i)
        if not self.eight_bits:
            return tensors[str(i)]
        return unpacked(tensors[str(i)], tensors[f"{i}.scales"], self.dtype)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Inside the block a shard that is damaged raises InputError."""
    try:
        yield
    except Exception as error:  # safetensors raises what the header's bytes lead to
        raise InputError(f"{file} is missing or damaged: {remedy(file)}") from error


def remedy(path: Path) -> str:
    return f"delete {path.name}, and the same command stores it anew"


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def bytes_per_token(target: Target, taps: tuple[int, ...], eight_bits: bool) -> int:
    """Bytes that a token's features take."""
    width = target.feature_width + len(taps) * target.config.hidden_size
    return bytes_of(width) if eight_bits else width * target.dtype.itemsize


def prepare_folder(folder: Path, identity: Identity, needed: int) -> None:
    """Write the index of a new folder, or check that it holds features of the same target and data.

    identity: what the features depend on. needed: bytes. Raises InputError if they do not belong
    together or the disk has no room.
    """
    index = folder / INDEX
    if index.exists():
        if read_json(index, f"delete {folder} to store the features anew", FORMAT) != identity:
            raise InputError(
                f"{folder} holds features of another target or data; name another --features folder"
            )
        return
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the features need {needed / 2**30:.2f} GiB, {folder} has {free / 2**30:.2f} GiB free; "
            "leave out --features to compute them as training goes"
        )
    write_json(index, identity)


def complete(folder: Path, count: int) -> bool:
    """Whether all features of `count` conversations are stored, so that nothing is to write."""
    shards = range(-(-count // SHARD))
    return (folder / INDEX).exists() and all(
        shard_file(folder, number).exists() for number in shards
    )


def forwards(rows: Sequence[Tensor], number: int, batch_size: int) -> int:
    """The target's forwards that a shard takes."""
    return -(-min(SHARD, len(rows) - number * SHARD) // batch_size)


def write_shard(
    target: Target,
    rows: Sequence[Tensor],
    taps: tuple[int, ...],
    stored: StoredFeatures,
    number: int,
    batch_size: int,
) -> None:
    """Store one shard, under a temporary name first. Its checksums are those of its conversations."""
    numbers = range(number * SHARD, min((number + 1) * SHARD, len(rows)))
    ordered = sorted(numbers, key=lambda i: len(rows[i]))
    tensors: dict[str, Tensor] = {}
    checksums: dict[str, str] = {}
    for start in range(0, len(ordered), batch_size):
        some = ordered[start : start + batch_size]
        features = target.features(padded([rows[i] for i in some]), taps, last=True).cpu()
        for i, row in zip(some, features, strict=True):
            parts = stored.stored(row[: len(rows[i])].clone(), i)
            checksums[str(i)] = checksum.of_tensors(parts, {})
            tensors |= parts
    with writing(shard_file(stored.folder, number)) as temporary:
        save_file(tensors, temporary, metadata={OWNER: stored.owner} | checksums)
