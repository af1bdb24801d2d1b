"""Head directories: `config.json` with a file of tensors, by the names of `treespec.heads.tensors`.

Each file carries a checksum, which `load_head` verifies. `save_head` writes each file under a
temporary name and renames it, so a kill leaves the old file or the new one.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from treespec.heads import checksum
from treespec.heads.head import Config, Head
from treespec.heads.known import kind_of
from treespec.heads.names import HeadError, config_of, head_folder
from treespec.heads.registry import HEADS, HeadKind
from treespec.heads.tensors import read_tensors


def load_head(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    norm_output: bool | None = None,
) -> Head:
    """The head in a directory or hub repository. dtype: of its weights; default: the file's own.

    norm_output: of an EAGLE-3 head, in place of what its config says. Default: what it says.
    Some files of SpecForge say true for a head whose next feature is not normed (docs/formats.md).
    It also reads the formats of other projects (`treespec.heads.formats`).
    Raises HeadError for a missing or corrupt file, and for missing, unknown or misshapen tensors,
    by name.
    """
    # 1. The directory's content, as treespec's head of that kind has it.
    folder = head_folder(path)
    config, tensors = config_of(folder), read_tensors(folder)
    try:
        kind = HEADS[kind_of(config, tensors)]
        config, tensors = kind.read(config, tensors)
    except Exception as error:  # a file may say anything
        raise HeadError(f"{folder}: {_line(error)}") from error
    if norm_output is not None:
        if kind is not HEADS["eagle3"]:
            raise HeadError(f"{folder}: norm_output is for EAGLE-3 heads, it is {kind.known_as}")
        config = config | {"norm_output": norm_output}

    # 2. Compare the tensors with those that the config describes.
    try:
        with torch.device("meta"):
            described = kind.build(config)
    except Exception as error:
        raise HeadError(
            f"{folder / 'config.json'} does not describe {kind.known_as}: {_line(error)}"
        ) from error
    shapes = {name: value.shape for name, value in described.state_dict().items()}
    if missing := shapes.keys() - tensors.keys() - described.optional:
        raise HeadError(f"{folder}: the head lacks {_names(missing)}; {_doubt(config, kind)}")
    if unknown := tensors.keys() - shapes.keys():
        raise HeadError(f"{folder}: unknown tensors {_names(unknown)}; {_doubt(config, kind)}")
    for name, value in tensors.items():
        if value.shape != shapes[name]:
            raise HeadError(
                f"{folder}: {name} is {list(value.shape)}, config.json says {list(shapes[name])}"
            )
    if broken := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise HeadError(
            f"{folder}: {_names(broken)} hold values that are not finite; fetch or train the head "
            "again"
        )

    # 3. Build the head itself: some of its buffers follow from the config.
    head = kind.build(config)
    try:
        head.fill(tensors)
    except ValueError as error:
        raise HeadError(f"{folder}: {error}; fetch or train the head again") from error
    return head.to(device=device, dtype=dtype)


def save_head(
    head: Head,
    path: str | Path,
    dtype: torch.dtype | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Write the directory that `load_head` reads: tensors and config, each with its checksum.

    dtype: of the weights in the file. Default: the head's own.
    leave_out: names of tensors that the target has, from `head.optional`.
    Raises HeadError where it cannot be written.
    """
    # 1. Tensors and config, each with its checksum.
    path = Path(path)
    tensors = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in head.state_dict().items()
        if name not in leave_out
    }
    about = {"format": "pt"}
    about[checksum.FIELD] = checksum.of_tensors(tensors, about)
    config = json.dumps(checksum.sealed(head.config), indent=2) + "\n"
    writes: dict[str, Callable[[Path], object]] = {
        "model.safetensors": lambda file: save_file(tensors, file, metadata=about),
        "config.json": lambda file: file.write_text(config, encoding="utf-8"),
    }

    # 2. Write each file under a temporary name, then rename it.
    for name, write in writes.items():
        temporary = path / f".{name}.{os.getpid()}.tmp"
        try:
            path.mkdir(parents=True, exist_ok=True)
            write(temporary)
            os.replace(temporary, path / name)
        except (OSError, SafetensorError) as error:
            raise HeadError(
                f"cannot write {path / name}: {getattr(error, 'strerror', None) or error}"
            ) from error
        finally:
            with suppress(OSError):  # the folder is a file: nothing was written
                temporary.unlink(missing_ok=True)


def _doubt(config: Config, kind: HeadKind[Any]) -> str:
    """Why a head's tensors may be others than its kind's: its architecture, if no reader knows it."""
    named = config.get("architectures") or config.get("model_type") or "llama"
    names = set(map(str, named if isinstance(named, list) else [named]))
    if kind.architectures and (unknown := sorted(names - {*kind.architectures, "llama"})):
        return f"{unknown[0]} is no architecture of {kind.known_as} that treespec reads"
    return f"is it {kind.known_as}?"


def _line(error: Exception) -> str:
    """The whole message in one line."""
    return " ".join(str(error).split())


def _names(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
