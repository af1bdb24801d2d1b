"""The tensors of a head directory. From a pickle it loads nothing but tensors."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from treespec.heads import checksum
from treespec.heads.names import HeadError, damaged, inside, tensor_file


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a head directory, by name.

    Raises HeadError where there is none, or it holds something else.
    """
    file = tensor_file(folder)
    return _sharded(file) if file.suffix == ".json" else _loaded(file)


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        of_heads = {places[name] for name in places if name.startswith("medusa_head.")}
        names = sorted(of_heads or set(places.values()))  # without the model around the heads
        outside = [name for name in names if not inside(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HeadError(
            f"{index} is damaged: it names no files of tensors; fetch the head again"
        ) from error
    if outside:
        raise HeadError(
            f"{index} names {outside[0]!r}, a file outside the head's folder, which is not read; "
            "fetch the head again"
        )
    return {name: value for file in names for name, value in _loaded(index.parent / file).items()}


def _loaded(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise HeadError(f"{file} is missing; fetch or train the head again")
    return _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            names = stored.keys()
            tensors = {name: stored.get_tensor(name) for name in names}
            about = dict(stored.metadata() or {})
    except Exception as error:  # safetensors raises what its header's bytes lead to
        raise damaged(file, error) from error
    expected = about.pop(checksum.FIELD, None)
    if expected is not None and expected != checksum.of_tensors(tensors, about):
        raise HeadError(
            f"{file} is damaged, its checksum does not match; fetch or train the head again"
        )
    return tensors


def _pickled(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise damaged(file, error) from error
    except Exception as error:
        raise HeadError(
            f"{file} holds more than tensors and is not loaded: {type(error).__name__}"
        ) from error
    named = isinstance(tensors, dict)
    if not named or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise HeadError(f"{file} is no file of tensors by name; fetch or train the head again")
    return tensors
