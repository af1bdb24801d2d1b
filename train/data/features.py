"""The target's features: as training goes, or stored once in safetensors shards.

F values a position: what the head taps, with the last hidden state behind it, or that alone.
A thread reads the rows of the next batch, and no other of their shards, while a step computes.

In 8 bits (`--feature-dtype int8`) each row of 64 values has a scale, so that the few values of a
layer that are far larger than all others do not cost the rest their precision:

    feature [F] of a position      | 64 values | 64 values | … |
    scales                            0.013       0.21
    stored                            whole numbers from -127 to 127
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files import checksum
from treespec.files.atomic import locked, read_json, write_json, writing
from treespec.model.identity import target_identity
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.batches import padded
from treespec.train.machine import whole

Identity = dict[str, Any]  # what the features depend on, as the index holds it

SHARD = 256  # conversations a file
FORMAT = 1
INDEX = "index.json"
AHEAD = 4  # batches read before they are asked for
OWNER = "features"  # metadata of a shard: the digest of the index that it belongs to
ROW = 64  # values that share a scale
LARGEST = 127


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
        self.eight_bits: bool = identity["eight_bits"]
        self.dtype: torch.dtype = getattr(torch, str(identity["dtype"]).removeprefix("torch."))
        self.verified: set[int] = set()
        self.shards: dict[int, tuple[Any, dict[str, str]]] = {}  # open files and their metadata
        self.reader = ThreadPoolExecutor(1, "features")
        self.ahead: dict[tuple[int, ...], Future[Tensor]] = {}

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded. Raises InputError for a damaged shard."""
        if tuple(numbers) not in self.ahead:
            self.expect(numbers)
        return self.ahead.pop(tuple(numbers)).result().to(self.device)

    def expect(self, numbers: Sequence[int]) -> None:
        """Begin to read what `batch` will be asked for."""
        while len(self.ahead) >= AHEAD:
            self.ahead.pop(next(iter(self.ahead))).cancel()
        reading = self.reader.submit(lambda: padded([self._row(i) for i in numbers]))
        self.ahead[tuple(numbers)] = reading

    def file(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

    def holds(self, number: int) -> bool:
        """Whether a shard is there. Raises InputError for one of other features."""
        file = self.file(number)
        if not file.exists():
            return False
        with readable(file), safe_open(file, framework="pt") as shard:
            owner = (shard.metadata() or {}).get(OWNER)
        if owner != self.owner:
            raise InputError(
                f"{file} holds features of another target or data: delete {self.folder} to store them again"
            )
        return True

    def write(self, number: int, features: Iterator[tuple[int, Tensor]]) -> None:
        """Store one shard, under a temporary name first. features: [T, F] by conversation."""
        tensors: dict[str, Tensor] = {}
        about = {OWNER: self.owner}
        for i, row in features:
            parts = {str(i): row.clone()}
            if self.eight_bits:
                parts = dict(zip(self._names(i), packed(row), strict=True))
            about[str(i)] = checksum.of_tensors(parts, {})
            tensors |= parts
        with writing(self.file(number)) as temporary:
            save_file(tensors, temporary, metadata=about)

    def _names(self, i: int) -> list[str]:
        """The tensors of conversation i."""
        return [str(i), f"{i}.scales"] if self.eight_bits else [str(i)]

    def _row(self, i: int) -> Tensor:
        """[T, F] features of a conversation, of whose shard no other is read."""
        # 1. Its tensors.
        number = i // SHARD
        file = self.file(number)
        with readable(file):
            if number not in self.shards:
                shard = safe_open(file, framework="pt")
                self.shards[number] = shard, shard.metadata() or {}
            shard, about = self.shards[number]
            tensors = {name: shard.get_tensor(name) for name in self._names(i)}

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
    return f"delete {path.name}, and the same command stores it again"


def packed(features: Tensor) -> tuple[Tensor, Tensor]:
    """[T, F] features -> [T, F] int8 numbers, and [T, F / ROW] float16 scales, rounded up."""
    values = in_rows(features.float())
    scales = (values.abs().amax(-1) / LARGEST).to(torch.float16)
    steps = scales.float()[..., None].clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (values / steps).round().clamp(-LARGEST, LARGEST)  # the scale itself was rounded
    return numbers.flatten(-2)[..., : features.shape[-1]].to(torch.int8), scales


def unpacked(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, F] features from what `packed` returned."""
    values = in_rows(numbers.float()) * scales.float()[..., None]
    return values.flatten(-2)[..., : numbers.shape[-1]].to(dtype)


def in_rows(values: Tensor) -> Tensor:
    """[T, F] -> [T, F / ROW, ROW], the last row filled with zeros."""
    return F.pad(values, (0, -values.shape[-1] % ROW)).unflatten(-1, (-1, ROW))


@final
@dataclass(frozen=True)
class Store:
    """Writes the features that are not stored yet. rows: the tokens [T] of each conversation."""

    config: TrainConfig
    target: Target
    rows: list[Tensor]
    taps: tuple[int, ...]
    accelerator: Accelerator

    def filled(self) -> StoredFeatures:
        """The features of all rows, of which each process has written its own shards."""
        # 1. Everything that the features depend on, and how much they take.
        config, target, accelerator = self.config, self.target, self.accelerator
        folder, eight_bits = Path(config.features or ""), config.feature_dtype == "int8"
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            digest.update(row.numpy().tobytes())
        identity: Identity = {
            "format": FORMAT,
            "content": target_identity(config.target, config.placement),
            "dtype": str(target.dtype),
            "tokens": digest.hexdigest(),
            "taps": list(self.taps),
            "eight_bits": eight_bits,
        }
        width = target.feature_width + len(self.taps) * target.config.hidden_size
        per_token = width * target.dtype.itemsize
        if eight_bits:
            per_token = width + torch.float16.itemsize * -(-width // ROW)
        needed = per_token * sum(map(len, self.rows))
        size = f"{needed / 2**30:.2f} GiB, {per_token:,} bytes per token"
        accelerator.print(f"features: {size}, in {folder}")

        # 2. The main process holds the folder until all processes have written their shards.
        stored = StoredFeatures(folder, identity, accelerator.device)
        shards = range(-(-len(self.rows) // SHARD))
        complete = (folder / INDEX).exists() and all(stored.file(n).exists() for n in shards)
        writes = accelerator.is_main_process and not complete
        with locked(folder) if writes else nullcontext():
            if accelerator.is_main_process:
                prepare_folder(folder, identity, needed)
            accelerator.wait_for_everyone()
            mine = shards[accelerator.process_index :: accelerator.num_processes]
            self._write(stored, [shard for shard in mine if not stored.holds(shard)])
            accelerator.wait_for_everyone()
        return stored

    def _write(self, stored: StoredFeatures, missing: list[int]) -> None:
        """Write shards. A sharded target makes as many forwards in all processes."""
        own = most = sum(len(self._batches(shard)) for shard in missing)
        if self.config.shard_target:
            counts = torch.tensor([own], device=self.accelerator.device)
            most = int(self.accelerator.gather(counts).max())
        if not most:
            return
        with whole(self.target, self.config, self.accelerator, "store its features") as full:
            for shard in missing:
                stored.write(shard, self._features(full, shard))
            for _ in range(most - own):
                full.features(self.rows[0][None], self.taps, last=True)

    def _batches(self, shard: int) -> list[list[int]]:
        """The conversations of a shard in batches of similar lengths."""
        numbers = range(shard * SHARD, min((shard + 1) * SHARD, len(self.rows)))
        ordered, size = sorted(numbers, key=lambda i: len(self.rows[i])), self.config.batch_size
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def _features(self, target: Target, shard: int) -> Iterator[tuple[int, Tensor]]:
        for numbers in self._batches(shard):
            features = live(target, self.rows, self.taps)(numbers).cpu()
            for i, row in zip(numbers, features, strict=True):
                yield i, row[: len(self.rows[i])]


def live(
    target: Target, rows: Sequence[Tensor], taps: tuple[int, ...]
) -> Callable[[Sequence[int]], Tensor]:
    """(numbers of conversations) -> [B, T, F] their features, padded, computed by the target."""
    return lambda numbers: target.features(padded([rows[i] for i in numbers]), taps, last=True)


def prepare_folder(folder: Path, identity: Identity, needed: int) -> None:
    """Write the index of a new folder, or check that it holds features of the same target and data.

    identity: what the features depend on. needed: bytes. Raises InputError if they do not belong
    together or the disk has no room.
    """
    index = folder / INDEX
    if index.exists():
        if read_json(index, f"delete {folder} to store the features again", FORMAT) != identity:
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
