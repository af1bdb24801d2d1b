"""The target's features, stored once in safetensors shards.

A position has F values: the aux hidden states that the head reads, if it has aux layers, then the last hidden
state.
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
from treespec.train.progress import PhaseProgress

SHARD_CONVERSATIONS = 256  # conversations a file
FEATURES_FORMAT = 3
SHARD_NAMES = "features-*.safetensors"


@final
class StoredFeatures:
    """Shards in a folder, such as `features-00000.safetensors`. Conversation i has the name "i" in its shard.

    A shard's metadata has a checksum for each conversation. The first read of a conversation verifies it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: set[int] = set()

    def build_shard_path(self, shard: int) -> Path:
        return self.folder / SHARD_NAMES.replace("*", f"{shard:05d}")

    def write(self, shard: int, features: dict[str, Tensor]) -> None:
        """Write a shard, under a temporary name first. features: [T, F] by the conversation's name."""
        about = {name: hash_tensors({"": row}, {}) for name, row in features.items()}
        with writing(self.build_shard_path(shard)) as temporary:
            save_file(features, temporary, metadata=about)

    def read_row(self, i: int) -> Tensor:
        """Read the features [T, F] of conversation i. Raises InputError for a missing or damaged shard."""
        file = self.build_shard_path(i // SHARD_CONVERSATIONS)
        try:
            with safe_open(file, framework="pt") as shard:
                row = shard.get_tensor(str(i))
                about = shard.metadata()
            if i not in self.verified and about[str(i)] != hash_tensors({"": row}, {}):
                raise ValueError("its checksum does not match")
        except Exception as error:  # safetensors raises errors of many types for a damaged header
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
    """Store the features of all conversations; each process writes its share of the missing shards.

    Args:
        config: the run's options. The shards lie below --features, in a folder named by a digest of all that the
            features depend on.
        target: the target, or its ends; then the whole target is loaded if a shard is missing.
        rows: the tokens [T] of each conversation.
        aux_layers: the target layers whose inputs the head reads.
        accelerator: the processes.

    Raises:
        InputError: if the disk has too little space.
    """
    # 1. The folder, and the size of the features.
    assert config.features is not None
    folder = Path(config.features) / compute_inputs_digest(config, target, rows, aux_layers)
    stored_features = StoredFeatures(folder)
    width = target.feature_width + len(aux_layers) * target.config.hidden_size
    per_token = width * target.dtype.itemsize
    needed_gib = per_token * sum(map(len, rows)) / 2**30
    accelerator.print(f"features: {needed_gib:.2f} GiB, {per_token:,} bytes per token, in {folder}")

    # 2. The main process locks the folder until all processes have written their shards.
    shards = range(-(-len(rows) // SHARD_CONVERSATIONS))
    missing = [shard for shard in shards if not stored_features.build_shard_path(shard).exists()]
    folder_lock: AbstractContextManager[object] = nullcontext()
    if missing and accelerator.is_main_process:
        folder_lock = locked(folder)
    with folder_lock:
        if len(missing) == len(shards) and accelerator.is_main_process:
            free_gib = shutil.disk_usage(folder).free / 2**30
            if needed_gib > free_gib:
                raise InputError(
                    f"the features need {needed_gib:.2f} GiB, {folder} has {free_gib:.2f} GiB free; leave "
                    "out --features to compute them as training goes"
                )
        accelerator.wait_for_everyone()
        own_shards = missing[accelerator.process_index :: accelerator.num_processes]
        if own_shards:
            with whole(target, config, accelerator, "store its features") as full:
                full.check_aux_layers(aux_layers)
                store_shards(
                    config, full, rows, aux_layers, own_shards, stored_features, accelerator
                )
        accelerator.wait_for_everyone()
    return stored_features


def store_shards(
    config: TrainConfig,
    target: Target,
    rows: list[Tensor],
    aux_layers: tuple[int, ...],
    shards: Sequence[int],
    stored_features: StoredFeatures,
    accelerator: Accelerator,
) -> None:
    """Compute and write some shards, and print how far that is. Arguments as for `store`; target: the whole one."""
    shard_numbers = {shard: list_conversations(shard, len(rows)) for shard in shards}
    total = 0
    for numbers in shard_numbers.values():
        total += sum(len(rows[i]) for i in numbers)
    progress = PhaseProgress(accelerator, "storing features", total, "tokens")
    stored_tokens = 0
    for shard, numbers in shard_numbers.items():
        features = {}
        for name, row in compute_features(target, rows, aux_layers, numbers, config.forward_size):
            features[name] = row
            stored_tokens += len(row)
            progress.update(stored_tokens)
        stored_features.write(shard, features)


def list_conversations(shard: int, conversations: int) -> range:
    """List the numbers of the conversations in a shard. conversations: the number of all."""
    first = shard * SHARD_CONVERSATIONS
    return range(first, min(first + SHARD_CONVERSATIONS, conversations))


def compute_inputs_digest(
    config: TrainConfig, target: Target, rows: list[Tensor], aux_layers: tuple[int, ...]
) -> str:
    """Compute a digest of everything that the features of the conversations depend on."""
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
        aux_layers: the target layers whose inputs the head reads.
        numbers: the numbers in `rows` of the conversations to compute.
        size: conversations per forward.

    Yields:
        (number as a string, features [T, F]).
    """
    ordered = sorted(numbers, key=lambda i: len(rows[i]))
    for start in range(0, len(ordered), size):
        batch = ordered[start : start + size]
        tokens = pad_rows([rows[i] for i in batch])
        features = target.compute_features(tokens, aux_layers, last=True).cpu()
        for i, row_features in zip(batch, features, strict=True):
            yield str(i), row_features[: len(rows[i])].clone()
