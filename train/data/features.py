"""The target's features, stored once in safetensors shards.

F values a position: the features that the head reads, if there are aux layers, and then the last hidden
state. A thread reads the rows of the next batch while a step computes.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import hash_tensors, locked, writing
from treespec.model.identity import identify_target
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.batches import pad_rows
from treespec.train.machine import whole

SHARD_CONVERSATIONS = 256  # conversations a file
FEATURES_FORMAT = 3


@final
class StoredFeatures:
    """Shards in a folder: `features-00000.safetensors` holds conversation i under the name "i".

    A shard's metadata holds a checksum for each of its conversations, which is verified when it is
    first read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: set[int] = set()

    def build_shard_path(self, shard: int) -> Path:
        return self.folder / f"features-{shard:05d}.safetensors"

    def write(self, shard: int, features: dict[str, Tensor]) -> None:
        """Store one shard, under a temporary name first. features: [T, F] by conversation."""
        about = {name: hash_tensors({"": row}, {}) for name, row in features.items()}
        with writing(self.build_shard_path(shard)) as temporary:
            save_file(features, temporary, metadata=about)

    def read_row(self, i: int) -> Tensor:
        """[T, F] features of a conversation. Raises InputError for a damaged shard."""
        file = self.build_shard_path(i // SHARD_CONVERSATIONS)
        try:
            with safe_open(file, framework="pt") as shard:
                row = shard.get_tensor(str(i))
                about = shard.metadata()
            if i not in self.verified and about[str(i)] != hash_tensors({"": row}, {}):
                raise ValueError("its checksum does not match")
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(
                f"{file} is missing or damaged: delete it, and the same command stores it again"
            ) from error
        self.verified.add(i)
        return row


def store(
    config: TrainConfig,
    target: Target,
    rows: list[Tensor],
    aux_layers: tuple[int, ...],
    accelerator: Accelerator,
) -> StoredFeatures:
    """Store the features of all rows; each process writes its share of what is missing.

    Args:
        config: the run's options. The features lie in --features, in a folder named by all that they
            depend on.
        target: the target, or its ends: then the whole one is loaded if a shard is missing.
        rows: the tokens [T] of each conversation.
        aux_layers: the layers whose inputs the head reads.
        accelerator: the processes.

    Raises:
        InputError: where the disk has no room.
    """
    # 1. Everything that the features depend on, and how much they take.
    assert config.features is not None
    folder = Path(config.features) / compute_inputs_digest(config, target, rows, aux_layers)
    stored = StoredFeatures(folder)
    width = target.feature_width + len(aux_layers) * target.config.hidden_size
    per_token = width * target.dtype.itemsize
    needed = per_token * sum(map(len, rows)) / 2**30
    accelerator.print(f"features: {needed:.2f} GiB, {per_token:,} bytes per token, in {folder}")

    # 2. The main process holds the folder until all processes have written their shards.
    shards = range(-(-len(rows) // SHARD_CONVERSATIONS))
    missing = [shard for shard in shards if not stored.build_shard_path(shard).exists()]
    held: AbstractContextManager[object] = nullcontext()
    if missing and accelerator.is_main_process:
        held = locked(folder)
    with held:
        if len(missing) == len(shards) and accelerator.is_main_process:
            free = shutil.disk_usage(folder).free / 2**30
            if needed > free:
                raise InputError(
                    f"the features need {needed:.2f} GiB, {folder} has {free:.2f} GiB free; leave "
                    "out --features to compute them as training goes"
                )
        accelerator.wait_for_everyone()
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        if mine:
            with whole(target, config, accelerator, "store its features") as full:
                full.check_aux_layers(aux_layers)
                for shard in mine:
                    numbers = range(
                        shard * SHARD_CONVERSATIONS,
                        min((shard + 1) * SHARD_CONVERSATIONS, len(rows)),
                    )
                    computed = compute_features(full, rows, aux_layers, numbers, config.batch_size)
                    stored.write(shard, dict(computed))
        accelerator.wait_for_everyone()
    return stored


def compute_inputs_digest(
    config: TrainConfig, target: Target, rows: list[Tensor], aux_layers: tuple[int, ...]
) -> str:
    """A digest of everything that the features of conversations depend on."""
    identity = identify_target(config.target, config.placement)
    words = f"{FEATURES_FORMAT} {identity} {target.dtype} {aux_layers}"
    digest = hashlib.blake2b(words.encode(), digest_size=8)
    for row in rows:
        digest.update(row.numpy().tobytes())
    return digest.hexdigest()


def compute_features(
    target: Target,
    rows: Sequence[Tensor],
    aux_layers: tuple[int, ...],
    numbers: Sequence[int],
    size: int,
) -> Iterator[tuple[str, Tensor]]:
    """Compute features of conversations, `size` of similar lengths per forward.

    Args:
        target: the whole target.
        rows: the tokens [T] of each conversation.
        aux_layers: the layers whose inputs the head reads.
        numbers: of the conversations in `rows`.
        size: conversations per forward.

    Yields (number as a string, [T, F] features).
    """
    ordered = sorted(numbers, key=lambda i: len(rows[i]))
    for start in range(0, len(ordered), size):
        together = ordered[start : start + size]
        tokens = pad_rows([rows[i] for i in together])
        features = target.compute_features(tokens, aux_layers, last=True).cpu()
        for i, own in zip(together, features, strict=True):
            yield str(i), own[: len(rows[i])].clone()
