"""The identity of a target, head or other source of drafts, by which records know it.

A model that is trained again at the same path gets another identity. A model that is moved, or
named by another path, keeps its own.
"""

import hashlib
from pathlib import Path

from treespec.demo.fetch import model_path
from treespec.errors import InputError
from treespec.files.hub import mistyped
from treespec.model.folder import base_of, gguf_file, hub_file
from treespec.model.placement import AS_IT_IS, Placement

# Of files that models are loaded from.
SUFFIXES = {".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".pt", ".npy", ".py"}
BLOCK = 1 << 16  # bytes
BLOCKS = 256  # read of a file: all of up to 16 MiB, or 16 MiB of a larger one


def target_identity(name: str, how: Placement = AS_IT_IS) -> str:
    """`identity_of` a target, and of the form that its weights are held in.

    Raises InputError as `identity_of` does, and where a GGUF file is not there.
    """
    path = model_path(name)
    file = gguf_file(path, how)
    if file is None:
        own = identity_of(path, how.revision)
        if how.load_in is None:
            return own
        return f"{own} as {how.load_in}"

    # The weights are the GGUF file's; the others may give config and tokenizer.
    try:
        own = identity_of(path, how.revision)
    except InputError:  # repositories of GGUF often lack other files
        own = ""
    return f"{own} as gguf {digest({'': sampled(file)})}".strip()


def identity_of(name: str | Path, revision: str | None = None) -> str:
    """A digest of a file or of a directory's own files, or the commit of a hub repository.

    A directory's subfolders do not count. Of a large file it reads the first block and evenly
    spaced other blocks, 16 MiB in all: 16 GB of weights take about a tenth of a second. The first
    block holds a safetensors header, and in it our own checksum of all tensors. Weights of other
    projects that differ in a few small tensors alone may keep their identity.
    revision: of a hub repository.
    Raises InputError if there is no such file, directory or repository.
    """
    path = Path(model_path(str(name))).expanduser()
    try:
        if path.is_dir():
            return identify_folder(path)
        if path.is_file():
            return digest({"": sampled(path)})
    except OSError as error:
        file = error.filename or path
        reason = error.strerror or error
        raise InputError(f"cannot read {file}: {reason}") from error
    problem = mistyped(name)
    if problem:
        raise InputError(problem)
    config = hub_file(str(name), "config.json", revision, f"no directory {name}")
    return f"commit {config.parent.name}"


def identify_folder(folder: Path) -> str:
    """`identity_of` a directory: of its own files, and of the model that an adapter adapts."""
    parts = {}
    for file in folder.iterdir():
        is_hidden = file.name.startswith(".")
        if file.suffix in SUFFIXES and file.is_file() and not is_hidden:
            parts[file.name] = sampled(file)
    base = base_of(folder)
    if base:
        parts["base"] = identity_of(base)
    return digest(parts)


def digest(parts: dict[str, str]) -> str:
    """A digest of digests by name, short enough to read aloud."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


def sampled(file: Path) -> str:
    """SHA-256 of a file's size and of evenly spaced blocks, its first and last among them."""
    size = file.stat().st_size
    content = hashlib.sha256(str(size).encode())
    last = max(size - BLOCK, (BLOCKS - 1) * BLOCK)  # of a smaller file the blocks are all of it
    with file.open("rb", buffering=0) as data:
        for number in range(BLOCKS):
            data.seek(number * last // (BLOCKS - 1))
            content.update(data.read(BLOCK))
    return content.hexdigest()
