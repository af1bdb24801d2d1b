"""The identity of a target, head or other source of drafts, by which records know it.

A model that is trained again at the same path gets another identity. A model that is moved, or
named by another path, keeps its own.
"""

import hashlib
from pathlib import Path

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError
from treespec.files.hub import explain_missing
from treespec.model.folder import fetch_model_file, find_adapter_base, find_gguf_file
from treespec.model.placement import AS_IT_IS, Placement

# Of files that models are loaded from.
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
SAMPLE_BLOCKS = 256  # read of a file: all of up to 16 MiB, or 16 MiB of a larger one


def identify_target(name: str, placement: Placement = AS_IT_IS) -> str:
    """`identify_model` a target, and of the form that its weights are held in.

    Raises InputError as `identify_model` does, and where a GGUF file is not there.
    """
    path = find_model_path(name)
    file = find_gguf_file(path, placement)
    if file is None:
        own = identify_model(path, placement.revision)
        if placement.load_in is None:
            return own
        return f"{own} as {placement.load_in}"

    # The weights are the GGUF file's; the others may give config and tokenizer.
    try:
        own = identify_model(path, placement.revision)
    except InputError:  # repositories of GGUF often lack other files
        own = ""
    return f"{own} as gguf {hash_parts({'': hash_file_samples(file)})}".strip()


def identify_model(name: str | Path, revision: str | None = None) -> str:
    """A digest of a file or of a directory's own files, or the commit of a hub repository.

    A directory's subfolders do not count. Of a large file it reads the first block and evenly
    spaced other blocks, 16 MiB in all: 16 GB of weights take about a tenth of a second. The first
    block holds a safetensors header, and in it our own checksum of all tensors. Weights of other
    projects that differ in a few small tensors alone may keep their identity.
    revision: of a hub repository.
    Raises InputError if there is no such file, directory or repository.
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
    """`identify_model` a directory: of its own files, and of the model that an adapter adapts."""
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
    """A digest of digests by name, short enough to read aloud."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


def hash_file_samples(file: Path) -> str:
    """SHA-256 of a file's size and of evenly spaced blocks, its first and last among them."""
    size = file.stat().st_size
    content = hashlib.sha256(str(size).encode())
    last = max(
        size - SAMPLE_BLOCK_BYTES, (SAMPLE_BLOCKS - 1) * SAMPLE_BLOCK_BYTES
    )  # of a smaller file the blocks are all of it
    with file.open("rb", buffering=0) as data:
        for number in range(SAMPLE_BLOCKS):
            data.seek(number * last // (SAMPLE_BLOCKS - 1))
            content.update(data.read(SAMPLE_BLOCK_BYTES))
    return content.hexdigest()
