"""The tensors of a head directory, by the file names that the formats have. Nothing pickled but tensors is loaded."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

FILES = (  # the first that is there
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)


class HeadError(ValueError):
    """A head that cannot be used; the message names the file or tensor and the remedy."""

    exit_code = 2


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the first of FILES, by name. Raises HeadError where there is none, or it holds something else."""
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None:
        names = [name for name in FILES[2:] if "index" not in name]
        raise HeadError(f"{folder} has neither {FILES[0]} nor {', '.join(names)}")
    return _sharded(file) if file.suffix == ".json" else _loaded(file)


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        wanted = {file for name, file in places.items() if name.startswith("medusa_head.")}  # not the model around it
        files = [index.parent / file for file in sorted(wanted or set(places.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadError(f"{index} is damaged: it names no files of tensors; fetch the head again") from error
    return {name: value for file in files for name, value in _loaded(file).items()}


def _loaded(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise HeadError(f"{file} is damaged: {error}; fetch or train the head again") from error
    except Exception as error:
        raise HeadError(f"{file} holds more than tensors and is not loaded: {type(error).__name__}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise HeadError(f"{file} is no file of tensors by name; fetch or train the head again")
    return tensors
