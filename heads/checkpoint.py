"""Load and save head directories: `config.json` and a file of tensors (`treespec.heads.folder` has the names).

Each file carries a checksum, which `load_head` verifies. `save_head` writes each file under a
temporary name and renames it, so a kill leaves the old file or the new one. Pickles are loaded with
`weights_only`.
"""

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from treespec.errors import InputError, get_first_line
from treespec.files.atomic import add_checksum, read_tensors, write_tensors, write_text
from treespec.heads.architectures import find_names
from treespec.heads.folder import (
    FETCH_AGAIN_ADVICE,
    GGUF_FILE,
    WHOLE_MODEL_PREFIX,
    find_head_folder,
    find_tensor_file,
    is_inside_folder,
    read_head_config,
    strip_wrappers,
)
from treespec.heads.formats.fp8 import dequantize_head
from treespec.heads.head import Config, Head, Tensors
from treespec.heads.registry import HEAD_KINDS, detect_kind

UNREADABLE_ADVICE = (
    "if it is one, some of its files are missing or its project has changed the format; if not, "
    "treespec does not read it yet"
)

# How the modules of torch initialize parameters.
RANDOM_INITIALIZERS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


def load_head(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Head:
    """Load the head in a directory or hub repository, in treespec's format or another project's.

    Args:
        path: the directory or hub id.
        dtype: the dtype of the head's weights; default: the file's.
        device: where the weights go.

    Raises:
        InputError: for a missing or damaged file, and for tensors that are missing, unknown or of another
            shape than config.json says. It names them.
    """
    # 1. Convert config.json and the tensors to treespec's format.
    folder = find_head_folder(path)
    config = read_head_config(folder)
    tensors = read_head_tensors(folder)
    try:
        config, tensors = dequantize_head(config, strip_all_wrappers(tensors))
        kind = HEAD_KINDS[detect_kind(config, tensors)]
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    build = kind.build()
    architecture_names = ", ".join(find_names(config))
    try:
        config, tensors = resolve_name(kind.read)(config, tensors)
        with torch.device("meta"):
            described = build(config)
    except KeyError as error:
        raise build_config_error(folder, build.known_as, f"{error} is missing") from error
    except Exception as error:  # a file may say anything
        raise build_config_error(folder, build.known_as, str(error)) from error

    # 2. Check the tensors against the config's shapes on the meta device. Then build the head on the CPU, because
    #    some of its buffers are computed from the config.
    try:
        check_shapes(described, tensors, described.optional)
        with WithoutRandomNumbers():  # the tensors replace all parameters
            head: Head = build(config)
        head.fill(tensors)
    except ValueError as error:
        reading = f"it was read as {build.known_as}"
        if architecture_names:
            reading += f" ({architecture_names})"
        raise InputError(f"{folder}: {error}; {reading}: {UNREADABLE_ADVICE}") from error
    broken = [name for name, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise InputError(
            f"{folder}: {list_names(broken)} hold values that are not finite; {FETCH_AGAIN_ADVICE}"
        )
    return head.to(device=device, dtype=dtype)


@final
class WithoutRandomNumbers(TorchFunctionMode):
    """In this block modules do not draw the random numbers of their parameters, which stay uninitialized."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in RANDOM_INITIALIZERS:
            return None
        return func(*args, **(kwargs or {}))


def build_config_error(folder: Path, known_as: str, reason: str) -> InputError:
    """Build the one-line error for a config.json that a head's reader or class refuses."""
    words = " ".join(reason.split())
    return InputError(f"{folder / 'config.json'} does not describe {known_as}: {words}")


def strip_all_wrappers(tensors: Tensors) -> Tensors:
    """Remove the prefixes that training's wrappers put before tensors' names.

    The names stay if the file is a whole model with Medusa's heads: the prefix marks the heads there.
    Raises ValueError if two tensors get the same name.
    """
    if any(name.startswith(WHOLE_MODEL_PREFIX) for name in tensors):
        return tensors
    plain: Tensors = {}
    for name, value in tensors.items():
        stripped = strip_wrappers(name)
        if stripped in plain:
            raise ValueError(f"two tensors stand for {stripped}")
        plain[stripped] = value
    return plain


def save_head(
    head: Head,
    path: str | Path,
    dtype: torch.dtype | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Write a head directory that `load_head` reads: tensors and config, each with its checksum.

    Args:
        head: the head.
        path: the directory.
        dtype: the dtype of the weights in the file; default: the head's.
        leave_out: names of tensors that the target has, from `head.optional`.

    Raises:
        InputError: if the directory cannot be written.
    """
    tensors: Tensors = {}
    for name, value in head.state_dict().items():
        if name in leave_out:
            continue
        stored_dtype = value.dtype
        if dtype is not None and value.is_floating_point():
            stored_dtype = dtype
        tensors[name] = value.detach().to("cpu", stored_dtype)
    write_head(Path(path), add_checksum(head.config), tensors)


def write_head(folder: Path, config: Config, tensors: Tensors) -> None:
    """Write config.json, and the tensors with their checksum. Raises InputError as `save_head`."""
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def list_names(names: Iterable[str]) -> str:
    """List the first five names in alphabetical order, and the number of further ones."""
    ordered = sorted(names)
    words = ", ".join(ordered[:5])
    if len(ordered) > 5:
        words += f" and {len(ordered) - 5} more"
    return words


def check_shapes(
    module: nn.Module,
    tensors: Tensors,
    optional: Collection[str] = (),
    in_file: Callable[[str], str] = str,
) -> None:
    """Raises ValueError for tensors that are missing, unknown or of another shape than the module's.

    Args:
        module: the module that shall load the tensors.
        tensors: the tensors by the module's names.
        optional: names that may be missing.
        in_file: turns the module's name of a tensor into the file's, for the message.
    """
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    missing = shapes.keys() - tensors.keys() - set(optional)
    if missing:
        raise ValueError(f"it lacks {list_names(map(in_file, missing))}")
    unknown = tensors.keys() - shapes.keys()
    if unknown:
        raise ValueError(f"it holds unknown tensors {list_names(map(in_file, unknown))}")
    for name, value in tensors.items():
        if value.shape != shapes[name]:
            raise ValueError(
                f"{in_file(name)} is {list(value.shape)}, config.json says {list(shapes[name])}"
            )


def read_head_tensors(folder: Path) -> Tensors:
    """Read the tensors of a head directory, by name.

    Raises InputError if there is no file of tensors, or it is damaged.
    """
    first = find_tensor_file(folder)
    if first.name == GGUF_FILE:
        return read_gguf_tensors(first)
    files = [first]
    if first.suffix == ".json":
        files = [folder / name for name in read_index(first)]
    tensors = Tensors()
    for file in files:
        if file.suffix == ".safetensors":
            file_tensors, _ = read_tensors(file, FETCH_AGAIN_ADVICE)
        else:
            file_tensors = read_pickle(file)
        tensors |= file_tensors
    return tensors


def read_index(index: Path) -> list[str]:
    """List the files that an index names: of a whole model only those with Medusa's heads.

    Raises InputError for a damaged index, and for a file outside the head's folder.
    """
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {file for tensor, file in files.items() if tensor.startswith(WHOLE_MODEL_PREFIX)}
        if not names:
            names = set(files.values())
        ordered = sorted(names)
        outside = [name for name in ordered if not is_inside_folder(name)]
    except Exception as error:  # a file may say anything
        raise InputError(
            f"{index} is damaged: it names no files of tensors; {FETCH_AGAIN_ADVICE}"
        ) from error
    if outside:
        raise InputError(
            f"{index} names {outside[0]!r}, a file outside the head's folder: treespec reads none there"
        )
    return ordered


def read_gguf_tensors(file: Path) -> Tensors:
    """Read the tensors of llama.cpp's file. Raises InputError for a damaged file and for an unknown field."""
    try:
        tensors: Tensors = resolve_name("treespec.heads.formats.gguf:read_gguf")(file)
    except InputError:
        raise
    except Exception as error:  # a file may say anything
        raise InputError(
            f"{file} is damaged: {get_first_line(error)}; {FETCH_AGAIN_ADVICE}"
        ) from error
    return tensors


def read_pickle(file: Path) -> Tensors:
    """Read the tensors of a pickle. Raises InputError for a pickle that holds anything else."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        return {name: value.detach() for name, value in stored.items()}
    except Exception as error:
        raise InputError(
            f"{file} is damaged, or holds more than tensors by name and is not loaded: "
            f"{get_first_line(error)}; {FETCH_AGAIN_ADVICE}"
        ) from error
