"""The target's features: as training goes, or stored once in safetensors shards.

F values a position: what the head reads, then the last hidden state, or that alone. A thread
reads the rows of the next batch, and no other of their shards, while a step computes.

In 8 bits (`--feature-dtype int8`) each row of 64 values has a scale, so that the few values of a
layer that are far larger than all others do not cost the rest their precision:

    feature [F] of a position      | 64 values | 64 values | … |
    scales                            0.013       0.21
    stored                            whole numbers from -127 to 127, then the scales in float16
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import digest_of_tensors, locked, writing
from treespec.model.identity import target_identity
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.batches import padded
from treespec.train.machine import whole

SHARD = 256  # conversations a file
FORMAT = 2
ROW = 64  # values that share a scale
LARGEST = 127


@final
class StoredFeatures:
    """Shards in a folder: `features-00000.safetensors` holds conversation i under the name "i".

    dtype: of the features. A shard's metadata holds a checksum for each of its conversations, which
    is verified when it is first read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, eight_bits: bool) -> None:
        self.folder, self.dtype, self.eight_bits = folder, dtype, eight_bits
        self.verified: set[int] = set()

    def file(self, shard: int) -> Path:
        return self.folder / f"features-{shard:05d}.safetensors"

    def write(self, shard: int, features: Iterable[tuple[int, Tensor]]) -> None:
        """Store one shard, under a temporary name first. features: [T, F] by conversation."""
        tensors = {str(i): self.stored(row) for i, row in features}
        about = {name: digest_of_tensors({"": row}, {}) for name, row in tensors.items()}
        with writing(self.file(shard)) as temporary:
            save_file(tensors, temporary, metadata=about)

    def stored(self, row: Tensor) -> Tensor:
        """[T, F] features -> [T, ...] as a shard holds them."""
        return packed(row) if self.eight_bits else row.clone()

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """[B, T, F] features of conversations, padded. Raises InputError for a damaged shard."""
        return padded([self.row(i) for i in numbers])

    def row(self, i: int) -> Tensor:
        """[T, F] features of a conversation, of whose shard no other is read."""
        file = self.file(i // SHARD)
        try:
            with safe_open(file, framework="pt") as shard:
                stored, about = shard.get_tensor(str(i)), shard.metadata()
            if i not in self.verified and about[str(i)] != digest_of_tensors({"": stored}, {}):
                raise ValueError("its checksum does not match")
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(
                f"{file} is missing or damaged: delete it, and the same command stores it again"
            ) from error
        self.verified.add(i)
        return unpacked(stored, self.dtype) if self.eight_bits else stored


def packed(features: Tensor) -> Tensor:
    """[T, F] features -> [T, F + 2 ⌈F / ROW⌉] int8: numbers, and the bytes of float16 scales."""
    values = in_rows(features.float())
    scales = (values.abs().amax(-1) / LARGEST).to(torch.float16)
    steps = scales.float()[..., None].clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (values / steps).round().clamp(-LARGEST, LARGEST)  # the scale itself was rounded
    numbers = numbers.flatten(-2)[..., : features.shape[-1]].to(torch.int8)
    return torch.cat([numbers, scales.view(torch.int8)], dim=-1)


def unpacked(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, F] features from what `packed` returned."""
    scales = -(-stored.shape[-1] // (ROW + 2))
    numbers, scale_bytes = stored[..., : -2 * scales], stored[..., -2 * scales :].contiguous()
    values = in_rows(numbers.float()) * scale_bytes.view(torch.float16).float()[..., None]
    return values.flatten(-2)[..., : numbers.shape[-1]].to(dtype)


def in_rows(values: Tensor) -> Tensor:
    """[T, F] -> [T, F / ROW, ROW], the last row filled with zeros."""
    return F.pad(values, (0, -values.shape[-1] % ROW)).unflatten(-1, (-1, ROW))


def store(
    config: TrainConfig,
    target: Target,
    rows: list[Tensor],
    aux_layers: tuple[int, ...],
    accelerator: Accelerator,
) -> StoredFeatures:
    """The features of all rows; each process writes its share of what is missing.

    They lie in --features, in a folder named by all that they depend on. rows: the tokens [T] of each
    conversation. Raises InputError where the disk has no room.
    """
    # 1. Everything that the features depend on, and how much they take.
    digest = hashlib.blake2b(digest_size=8)
    identity = target_identity(config.target, config.placement)
    digest.update(
        f"{FORMAT} {identity} {target.dtype} {aux_layers} {config.feature_dtype}".encode()
    )
    for row in rows:
        digest.update(row.numpy().tobytes())
    folder = Path(config.features or "") / digest.hexdigest()
    stored = StoredFeatures(folder, target.dtype, config.feature_dtype == "int8")
    width = target.feature_width + len(aux_layers) * target.config.hidden_size
    per_token = stored.stored(torch.zeros(1, width, dtype=target.dtype)).nbytes
    needed = per_token * sum(map(len, rows)) / 2**30
    accelerator.print(f"features: {needed:.2f} GiB, {per_token:,} bytes per token, in {folder}")

    # 2. The main process holds the folder until all processes have written their shards.
    shards = range(-(-len(rows) // SHARD))
    missing = [shard for shard in shards if not stored.file(shard).exists()]
    with locked(folder) if missing and accelerator.is_main_process else nullcontext():
        if len(missing) == len(shards) and accelerator.is_main_process:
            free = shutil.disk_usage(folder).free / 2**30
            if needed > free:
                raise InputError(
                    f"the features need {needed:.2f} GiB, {folder} has {free:.2f} GiB free; leave "
                    "out --features to compute them as training goes"
                )
        accelerator.wait_for_everyone()
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        work: dict[int, list[list[int]]] = {}  # of each shard, batches of similar lengths
        for shard in mine:
            numbers = range(shard * SHARD, min((shard + 1) * SHARD, len(rows)))
            ordered, size = sorted(numbers, key=lambda i: len(rows[i])), config.batch_size
            work[shard] = [ordered[at : at + size] for at in range(0, len(ordered), size)]

        # 3. A sharded target makes as many forwards in all processes.
        own = most = sum(map(len, work.values()))
        if config.shard_target:
            counts = torch.tensor([own], device=accelerator.device)
            most = int(accelerator.gather(counts).max())
        if most:
            with whole(target, config, accelerator, "store its features") as full:
                for shard, batches in work.items():
                    stored.write(shard, computed(full, rows, aux_layers, batches))
                for _ in range(most - own):
                    full.features(rows[0][None], aux_layers, last=True)
        accelerator.wait_for_everyone()
    return stored


def computed(
    target: Target, rows: Sequence[Tensor], aux_layers: tuple[int, ...], batches: list[list[int]]
) -> Iterator[tuple[int, Tensor]]:
    """(number, [T, F] features) of conversations, by the target."""
    for numbers in batches:
        features = target.features(padded([rows[i] for i in numbers]), aux_layers, last=True).cpu()
        for i, row in zip(numbers, features, strict=True):
            yield i, row[: len(rows[i])]
