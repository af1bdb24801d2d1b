"""The target's features, stored once in safetensors shards.

A position has F values: the aux hidden states that the head reads, if it has aux layers, then the last hidden
state.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import hash_tensors, locked, writing
from treespec.model.identity import identify_target
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.data.batches import pad_rows, split_by_tokens
from treespec.train.data.served import serve_features
from treespec.train.machine import whole
from treespec.train.progress import PhaseProgress

SHARD_CONVERSATIONS = 256  # conversations of a shard, in one file or in pieces
PIECE_BYTES = 512 << 20  # features in memory before they are written
PIECE_SECONDS = 30.0  # a kill loses no more than the work of this time
FEATURES_FORMAT = 3
SHARD_NAMES = "features-*.safetensors"
# (tokens [T] of each conversation, numbers of those to compute) -> (number as a string, features [T, F]) of each
FeatureSource: TypeAlias = Callable[[Sequence[Tensor], Sequence[int]], Iterable[tuple[str, Tensor]]]
TargetUse: TypeAlias = Callable[[Target], None]


@final
class StoredFeatures:
    """Shards in a folder, such as `features-00000.safetensors`. Conversation i has the name "i" in its shard.

    A shard that took long to compute is in pieces: features-00000.000.safetensors, features-00000.001.safetensors, …
    A file's metadata has a checksum for each conversation. The first read of a conversation verifies it.

    folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: set[int] = set()
        self.files: dict[int, dict[str, Path]] = {}  # by shard, then by conversation

    def build_shard_path(self, shard: int) -> Path:
        return self.folder / SHARD_NAMES.replace("*", f"{shard:05d}")

    def list_files(self, shard: int) -> list[Path]:
        """List the files of a shard: one, or its pieces in order."""
        path = self.build_shard_path(shard)
        files = sorted(self.folder.glob(f"{path.stem}.[0-9]*.safetensors"))
        if path.exists():
            files.append(path)
        return files

    def list_stored(self, shard: int) -> dict[str, Path]:
        """Find the file of each stored conversation of a shard. Raises InputError for a damaged file."""
        stored = {}
        for file in self.list_files(shard):
            try:
                with safe_open(file, framework="pt") as content:
                    names = list(content.keys())
            except (
                Exception
            ) as error:  # safetensors raises errors of many types for a damaged header
                raise build_damage_error(file) from error
            for name in names:
                stored[name] = file
        return stored

    def list_missing(self, conversations: int) -> dict[int, list[int]]:
        """List the conversations that are not stored yet, by shard. conversations: the number of all."""
        missing = {}
        for shard in range(-(-conversations // SHARD_CONVERSATIONS)):
            stored = self.list_stored(shard)
            numbers = [i for i in list_conversations(shard, conversations) if str(i) not in stored]
            if numbers:
                missing[shard] = numbers
        return missing

    def write(self, shard: int, features: dict[str, Tensor], is_whole: bool = True) -> None:
        """Write a shard, or a piece of it, under a temporary name first. features: [T, F] by conversation."""
        path = self.build_shard_path(shard)
        if not is_whole:
            path = path.with_name(f"{path.stem}.{len(self.list_files(shard)):03d}{path.suffix}")
        about = {name: hash_tensors({"": row}, {}) for name, row in features.items()}
        with writing(path) as temporary:
            save_file(features, temporary, metadata=about)

    def read_row(self, i: int) -> Tensor:
        """Read the features [T, F] of conversation i. Raises InputError for a missing or damaged file."""
        shard = i // SHARD_CONVERSATIONS
        if shard not in self.files:
            self.files[shard] = self.list_stored(shard)
        file = self.files[shard].get(str(i), self.build_shard_path(shard))
        try:
            with safe_open(file, framework="pt") as content:
                row = content.get_tensor(str(i))
                about = content.metadata()
            if i not in self.verified and about[str(i)] != hash_tensors({"": row}, {}):
                raise ValueError("its checksum does not match")
        except Exception as error:  # safetensors raises errors of many types for a damaged header
            raise build_damage_error(file) from error
        self.verified.add(i)
        return row


def build_damage_error(file: Path) -> InputError:
    """Build the error of a file of features that cannot be read."""
    return InputError(
        f"{file} is missing or damaged: delete it, and the same command stores it again"
    )


class FeaturePart(NamedTuple):
    """Conversations whose features are stored together.

    Attributes:
        name: for messages.
        rows: the tokens [T] of each conversation.
        stored: where their features are.
        needed: the number of conversations that are needed, the first ones.
    """

    name: str
    rows: list[Tensor]
    stored: StoredFeatures
    needed: int

    def count_tokens(self, shards: Iterable[list[int]]) -> int:
        """Count the tokens of conversations. shards: their numbers, by shard."""
        return sum(len(self.rows[i]) for numbers in shards for i in numbers)


def store(
    config: TrainConfig,
    target: Target,
    rows: list[Tensor],
    held_out_rows: list[Tensor],
    aux_layers: tuple[int, ...],
    accelerator: Accelerator,
    use_target: TargetUse,
) -> tuple[StoredFeatures, StoredFeatures]:
    """Store the features of all conversations; each process writes its share of the missing shards.

    Args:
        config: the run's options. The shards lie below --features, in a folder named by a digest of all that the
            features depend on; those of held-out conversations in a folder within.
        target: the target, or its ends; then the whole target is loaded if a shard is missing, unless
            --features-from names a server.
        rows: the tokens [T] of each conversation to train on.
        held_out_rows: those of the held-out conversations. Features of those that validations read are stored.
        aux_layers: the target layers whose inputs the head reads.
        accelerator: the processes.
        use_target: called in the main process with the whole target, if it was loaded, when all is stored.

    Returns:
        The features of the conversations to train on, and of the held-out ones.

    Raises:
        InputError: if the disk has too little space, and for a server that does not serve the target's states.
    """
    # 1. The folders, and the size of the features.
    assert config.features is not None
    folder = Path(config.features) / compute_inputs_digest(config, target, rows, aux_layers)
    digest = compute_inputs_digest(config, target, held_out_rows, aux_layers)
    held_out_needed = min(config.validate_on, len(held_out_rows))
    parts = [
        FeaturePart("features", rows, StoredFeatures(folder), len(rows)),
        FeaturePart(
            "features of held-out conversations",
            held_out_rows,
            StoredFeatures(folder / f"held-out-{digest}"),
            held_out_needed,
        ),
    ]
    width = target.feature_width + len(aux_layers) * target.config.hidden_size
    per_token = width * target.dtype.itemsize
    missing = [part.stored.list_missing(part.needed) for part in parts]
    missing_bytes = 0
    for part, shards in zip(parts, missing, strict=True):
        part_gib = per_token * sum(map(len, part.rows[: part.needed])) / 2**30
        accelerator.print(
            f"{part.name}: {part_gib:.2f} GiB, {per_token:,} bytes per token, in {part.stored.folder}"
        )
        missing_bytes += per_token * part.count_tokens(shards.values())

    # 2. The main process locks the folders until all processes have written their shards.
    with ExitStack() as locks:
        if missing_bytes and accelerator.is_main_process:
            locks.enter_context(locked(folder))
            check_room(folder, missing_bytes)
        accelerator.wait_for_everyone()
        idle_forwards = 0
        if config.shard_target:
            idle_forwards = count_idle_forwards(config, parts, missing, accelerator)
        if idle_forwards or any(list_share(shards, accelerator) for shards in missing):
            with open_source(config, target, aux_layers, parts, accelerator, use_target) as source:
                for part, shards in zip(parts, missing, strict=True):
                    store_shards(source, part, shards, accelerator)
                run_idle_forwards(source, rows, idle_forwards)
        accelerator.wait_for_everyone()
    train_part, held_out_part = parts
    return train_part.stored, held_out_part.stored


@contextmanager
def open_source(
    config: TrainConfig,
    target: Target,
    aux_layers: tuple[int, ...],
    parts: Sequence[FeaturePart],
    accelerator: Accelerator,
    use_target: TargetUse,
) -> Iterator[FeatureSource]:
    """Context manager: yield what computes features: the server of --features-from, or the whole target.

    Arguments as for `store`. parts: all conversations.
    """
    if config.features_from is not None:
        rows = [row for part in parts for row in part.rows]
        yield serve_features(config, target, aux_layers, rows, accelerator)
        return
    with whole(target, config, accelerator, "store its features") as full:
        full.check_aux_layers(aux_layers)

        def compute(rows: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
            forwards = split_forwards(rows, numbers, config)
            return compute_features(full, rows, aux_layers, forwards)

        yield compute
        if accelerator.is_main_process:
            use_target(full)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raises InputError if the features do not fit the disk."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    needed_gib = needed_bytes / 2**30
    if needed_gib > free_gib:
        raise InputError(
            f"the features need {needed_gib:.2f} GiB, {folder} has {free_gib:.2f} GiB free; leave out "
            "--features to compute them as training goes"
        )


def list_share(
    shards: dict[int, list[int]], accelerator: Accelerator, process: int | None = None
) -> list[int]:
    """List the shards that a process writes. process: its number; default: this one's."""
    if process is None:
        process = accelerator.process_index
    return list(shards)[process :: accelerator.num_processes]


def count_idle_forwards(
    config: TrainConfig,
    parts: Sequence[FeaturePart],
    missing: Sequence[dict[int, list[int]]],
    accelerator: Accelerator,
) -> int:
    """Count the forwards that this process runs less than the busiest one, where all run a divided target together.

    Args:
        config: the run's options.
        parts: all conversations.
        missing: for each part the conversations to store, by shard.
        accelerator: the processes.
    """
    counts = []
    for process in range(accelerator.num_processes):
        forwards = 0
        for part, shards in zip(parts, missing, strict=True):
            for shard in list_share(shards, accelerator, process):
                forwards += len(split_forwards(part.rows, shards[shard], config))
        counts.append(forwards)
    return max(counts) - counts[accelerator.process_index]


def run_idle_forwards(source: FeatureSource, rows: Sequence[Tensor], count: int) -> None:
    """Run forwards of the shortest conversation whose features are not kept. Arguments as for `store`."""
    shortest = min(range(len(rows)), key=lambda i: len(rows[i]))
    for _ in range(count):
        for _ in source(rows, [shortest]):
            pass


def store_shards(
    source: FeatureSource,
    part: FeaturePart,
    missing: dict[int, list[int]],
    accelerator: Accelerator,
) -> None:
    """Compute and write this process's shards of a part, and print how far that is.

    A piece is written whenever it fills `PIECE_BYTES` or took `PIECE_SECONDS`, so that memory stays bounded, and a
    run that is killed goes on from its last piece.

    Args:
        source: computes the features.
        part: the conversations.
        missing: the conversations to store, by shard.
        accelerator: the processes.
    """
    share = {shard: missing[shard] for shard in list_share(missing, accelerator)}
    total = part.count_tokens(share.values())
    progress = PhaseProgress(accelerator, f"storing {part.name}", total, "tokens")
    stored_tokens = 0
    for shard, numbers in share.items():
        pieces = bool(part.stored.list_files(shard))
        piece: dict[str, Tensor] = {}
        started = time.monotonic()
        for name, row in source(part.rows, numbers):
            piece[name] = row
            stored_tokens += len(row)
            progress.update(stored_tokens)
            is_large = sum(value.nbytes for value in piece.values()) >= PIECE_BYTES
            if is_large or time.monotonic() >= started + PIECE_SECONDS:
                part.stored.write(shard, piece, is_whole=False)
                pieces = True
                piece = {}
                started = time.monotonic()
        if piece:
            part.stored.write(shard, piece, is_whole=not pieces)


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


def split_forwards(
    rows: Sequence[Tensor], numbers: Sequence[int], config: TrainConfig
) -> list[list[int]]:
    """Split conversations into forwards, each of similar lengths, as large as those of the training.

    Args:
        rows: the tokens [T] of each conversation.
        numbers: the numbers in `rows` of the conversations to compute.
        config: the run's options.
    """
    lengths = [len(row) for row in rows]
    ordered = sorted(numbers, key=lambda i: lengths[i])
    if config.batch_tokens is not None:
        return split_by_tokens(ordered, lengths, config.batch_tokens)
    size = config.forward_size
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def compute_features(
    target: Target,
    rows: Sequence[Tensor],
    aux_layers: tuple[int, ...],
    forwards: Iterable[list[int]],
) -> Iterator[tuple[str, Tensor]]:
    """Compute features of conversations.

    Args:
        target: the whole target.
        rows: the tokens [T] of each conversation.
        aux_layers: the target layers whose inputs the head reads.
        forwards: the numbers in `rows` of the conversations of each forward.

    Yields:
        (number as a string, features [T, F]).
    """
    for batch in forwards:
        tokens = pad_rows([rows[i] for i in batch])
        features = target.compute_features(tokens, aux_layers, last=True).cpu()
        for i, row_features in zip(batch, features, strict=True):
            yield str(i), row_features[: len(rows[i])].clone()
