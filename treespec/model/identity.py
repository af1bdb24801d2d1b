"""The identity of a target, head or other source of drafts, which records store.

A model that is trained again at the same path gets another identity. A model that is moved, or
named by another path, keeps its identity.
"""

import hashlib
from pathlib import Path

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError
from treespec.files.hub import explain_missing
from treespec.model.folder import fetch_model_file, find_adapter_base, find_gguf_file
from treespec.model.placement import AS_IT_IS, Placement

# Suffixes of files that models are loaded from.
IDENTITY_SUFFIXES = {
    ".json",
    ".jinja",
    ".model",
    ".txt",
    ".safetensors",
    ".bin",
    ".pt",
    ".npy",
    ".py",
}
SAMPLE_BLOCK_BYTES = 1 << 16  # bytes
SAMPLE_BLOCKS = 256  # blocks read of a file: 16 MiB, or the whole file if it is smaller


def identify_target(name: str, placement: Placement = AS_IT_IS) -> str:
    """Return the identity of a target with the form of its weights, such as `4bit`.

    Raises:
        InputError: as `identify_model`, or a GGUF file is not there.
    """
    path = find_model_path(name)
    file = find_gguf_file(path, placement)
    if file is None:
        identity = identify_model(path, placement.revision)
        if placement.load_in is None:
            return identity
        return f"{identity} as {placement.load_in}"

    # The weights come from the GGUF file; the model's other files may hold config and tokenizer.
    try:
        identity = identify_model(path, placement.revision)
    except InputError:  # repositories of GGUF often lack other files
        identity = ""
    return f"{identity} as gguf {hash_parts({'': hash_file_samples(file)})}".strip()


def identify_model(name: str | Path, revision: str | None = None) -> str:
    """Return a digest of a file or of a directory's files, or the commit of a hub repository.

    A directory's subfolders do not count. Of a large file it reads the first block and evenly
    spaced other blocks, 16 MiB in all: 16 GB of weights take about a tenth of a second. The first
    block holds a safetensors header, where treespec stores a checksum of all tensors. Weights of other
    projects may keep their identity if they differ only in a few small tensors.

    revision: of a hub repository.

    Raises:
        InputError: there is no such file, directory or repository.
    """
    path = Path(find_model_path(str(name))).expanduser()
    try:
        if path.is_dir():
            return identify_folder(path)
        if path.is_file():
            return hash_parts({"": hash_file_samples(path)})
    except OSError as error:
        file = error.filename or path
        reason = error.strerror or error
        raise InputError(f"cannot read {file}: {reason}") from error
    problem = explain_missing(name)
    if problem:
        raise InputError(problem)
    config = fetch_model_file(str(name), "config.json", revision, f"no directory {name}")
    return f"commit {config.parent.name}"


def identify_folder(folder: Path) -> str:
    """As `identify_model`, of a directory: its files, and the model that an adapter in it adapts."""
    parts = {}
    for file in folder.iterdir():
        is_hidden = file.name.startswith(".")
        if file.suffix in IDENTITY_SUFFIXES and file.is_file() and not is_hidden:
            parts[file.name] = hash_file_samples(file)
    base = find_adapter_base(folder)
    if base:
        parts["base"] = identify_model(base)
    return hash_parts(parts)


def hash_parts(parts: dict[str, str]) -> str:
    """Hash {name: digest} to 16 hexadecimal digits."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


def hash_file_samples(file: Path) -> str:
    """Return the SHA-256 of a file's size and of evenly spaced blocks, with the first and the last."""
    size = file.stat().st_size
    content = hashlib.sha256(str(size).encode())
    last = max(
        size - SAMPLE_BLOCK_BYTES, (SAMPLE_BLOCKS - 1) * SAMPLE_BLOCK_BYTES
    )  # in a smaller file the blocks cover everything
    with file.open("rb", buffering=0) as data:
        for number in range(SAMPLE_BLOCKS):
            data.seek(number * last // (SAMPLE_BLOCKS - 1))
            content.update(data.read(SAMPLE_BLOCK_BYTES))
    return content.hexdigest()
