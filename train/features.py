"""The target's features: as training goes, or stored once in safetensors shards.

F values a position: what the head taps, with the last hidden state behind it, or that alone.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor

from treespec.errors import InputError
from treespec.files import read_json, write_json, write_tensors
from treespec.heads import checksum
from treespec.target import Target
from treespec.train.batches import padded

Identity = dict[str, object]  # what the features depend on, as the index holds it

SHARD = 256  # conversations a file
INDEX = "index.json"
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
    conversations, which is verified when the conversation is first read. Shards of older versions
    have none.
    """

    def __init__(self, folder: Path, identity: Identity, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.owner = checksum.of_fields(
            {name: value for name, value in identity.items() if name != "target"}
        )
        self.older = "content" not in read_json(folder / INDEX, remedy(folder))
        self.verified: set[int] = set()

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded. Raises InputError for a damaged shard."""
        return padded([self._row(i) for i in numbers]).to(self.device)

    def holds(self, number: int) -> bool:
        """Whether a shard is there. Raises InputError for one of other features."""
        file = shard_file(self.folder, number)
        if not file.exists():
            return False
        with opened(file) as shard:
            owner = (shard.metadata() or {}).get(OWNER)
        if owner != self.owner and not (owner is None and self.older):
            raise InputError(
                f"{file} holds features of another target or data: delete {self.folder} to store them anew"
            )
        return True

    def _row(self, i: int) -> Tensor:
        file = shard_file(self.folder, i // SHARD)
        with opened(file) as shard:
            row: Tensor = shard.get_tensor(str(i))
            checksums = shard.metadata() or {}
        if i not in self.verified:
            found = checksum.of_tensors({str(i): row}, {})
            without = set(checksums) <= {OWNER}  # written by an older version
            if not without and checksums.get(str(i)) != found:
                raise InputError(f"{file} is damaged, a checksum does not match: {remedy(file)}")
            self.verified.add(i)
        return row


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A shard that is open for reading. Raises InputError for one that is damaged."""
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except Exception as error:  # safetensors raises what the header's bytes lead to
        raise InputError(f"{file} is missing or damaged: {remedy(file)}") from error


def remedy(path: Path) -> str:
    return f"delete {path.name}, and the same command stores it anew"


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def stored_size(target: Target, rows: Sequence[Tensor], taps: tuple[int, ...]) -> int:
    """Bytes that the features of these conversations take."""
    width = target.feature_width + len(taps) * target.config.hidden_size
    return sum(map(len, rows)) * width * target.dtype.itemsize


def prepare_folder(
    folder: Path, identity: Identity, needed: int, first: Callable[[], Tensor]
) -> None:
    """Write the index of a new folder, or check that it holds features of the same target and data.

    identity: what the features depend on. An index of an older version lacks "content", the
    target's identity. needed: bytes. first: computes the features [1, T, F] of conversation 0, to
    compare them with what an older version stored. Raises InputError if they do not belong together
    or the disk has no room.
    """
    index = folder / INDEX
    if index.exists():
        before = read_json(index, f"delete {folder} to store the features anew")
        if not same(before, identity) or (
            "content" not in before and not recomputed(folder, first)
        ):
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


def same(before: Identity, identity: Identity) -> bool:
    """Whether an index describes these features. An older index knows its target by path alone."""
    if "content" in before:
        same_target = before["content"] == identity["content"]
    else:
        same_target = (
            Path(str(before.get("target"))).resolve() == Path(str(identity["target"])).resolve()
        )
    names = (set(before) | set(identity)) - {"target", "content"}
    return same_target and all(before.get(name) == identity.get(name) for name in names)


def recomputed(folder: Path, first: Callable[[], Tensor]) -> bool:
    """Whether the target still gives conversation 0's stored features, up to rounding."""
    file = shard_file(folder, 0)
    if not file.exists():
        return True
    with opened(file) as shard:
        stored = shard.get_tensor("0").float()
    now = first()[0].float().cpu()
    return stored.shape == now.shape and bool((stored - now).norm() < 0.05 * stored.norm())


def write_shard(
    target: Target,
    rows: Sequence[Tensor],
    taps: tuple[int, ...],
    stored: StoredFeatures,
    number: int,
    batch_size: int,
) -> None:
    """Store one shard, under a temporary name first. A shard that stands is not written again."""
    if stored.holds(number):
        return
    numbers = range(number * SHARD, min((number + 1) * SHARD, len(rows)))
    ordered = sorted(numbers, key=lambda i: len(rows[i]))
    tensors: dict[str, Tensor] = {}
    for start in range(0, len(ordered), batch_size):
        some = ordered[start : start + batch_size]
        features = target.features(padded([rows[i] for i in some]), taps, last=True).cpu()
        tensors |= {
            str(i): row[: len(rows[i])].clone() for i, row in zip(some, features, strict=True)
        }
    checksums = {name: checksum.of_tensors({name: row}, {}) for name, row in tensors.items()}
    write_tensors(shard_file(stored.folder, number), tensors, {OWNER: stored.owner} | checksums)
