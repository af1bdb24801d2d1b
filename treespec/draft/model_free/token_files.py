"""Files of token sequences: the segments of a suffix cache, and datastores with a suffix array.

    tokens     [T] int32, END behind each sequence
    suffixes   [T] int32, of a datastore: the positions of `tokens`, sorted by the tokens that follow

A file names its format and a digest of the tokenizer. It is written whole or not at all, read by
memory mapping, and checked by its checksum.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from treespec.draft.model_free.suffix_index import END
from treespec.errors import InputError
from treespec.files.atomic import read_about, read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "2"
DATASTORE = "datastore.safetensors"


def fingerprint(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int = 0) -> str:
    """A digest of the vocabulary, tokens and their numbers. vocab_size: tells without a tokenizer."""
    if tokenizer is None:
        return f"{vocab_size} tokens"
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def write(path: Path, tokenizer: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace a file. tokenizer: a digest. Raises InputError."""
    from torch import from_numpy

    tensors = {name: from_numpy(array) for name, array in arrays.items()}
    write_tensors(path, tensors, {"format": FORMAT, "tokenizer": tokenizer})


def read(path: Path, tokenizer: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name, the checksum compared: about a second a GB.

    Raises InputError for a damaged file, another format and another tokenizer.
    """
    tensors, about = read_tensors(path, remedy(path))
    check_format(path, about)
    if about.get("tokenizer") != tokenizer:
        raise InputError(f"{path} is of another tokenizer than the target's: {remedy(path)}")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    tokens = arrays.get("tokens", np.empty(0))
    flat = all(array.dtype == np.int32 and array.ndim == 1 for array in arrays.values())
    if not flat or not len(tokens) or tokens[-1] != END or tokens.min() < END:
        raise InputError(f"{path} is damaged: {remedy(path)}")
    return arrays


def check_file(path: Path) -> None:
    """Raises InputError for a damaged file and another format, as far as the header tells."""
    check_format(path, read_about(path, remedy(path)))


def check_format(path: Path, about: Mapping[str, str]) -> None:
    if about.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {about.get('format')}, this treespec reads {FORMAT}: {remedy(path)}"
        )


def remedy(path: Path) -> str:
    """What to do about a file that cannot be used."""
    if path.name == DATASTORE:
        return "build it again with treespec datastore build --target TARGET"
    return "delete it to forget its answers, or name another folder"


def datastore_file(folder: str | Path) -> Path:
    """The file of a datastore. Raises InputError for a folder without one."""
    file = Path(folder).expanduser() / DATASTORE
    if not file.is_file():
        raise InputError(
            f"no datastore at {folder}: it has no {DATASTORE}; make one with treespec datastore "
            "build"
        )
    return file


def segments(folder: Path) -> list[Path]:
    """The files of a suffix cache, oldest first."""
    return sorted(folder.glob("[0-9]" * 6 + ".safetensors"))
