"""The tensors of a target's MTP layers, read from its own safetensors files."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from safetensors import safe_open

from treespec.errors import InputError, first_line
from treespec.heads.mtp_layouts import LayerNames, Layout, mtp_layers
from treespec.heads.names import inside

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
SCALE = "_scale_inv"  # behind the name of an fp8 weight: a factor for each of its blocks


def layers_in(name: str, files: Mapping[str, Path], layers: int) -> tuple[Layout, list[LayerNames]]:
    """The MTP layers in a target's files. name: the target's. layers: of the target itself.

    Raises InputError as `mtp_layers` does.
    """
    try:
        return mtp_layers(files.keys(), layers)
    except ValueError as error:
        raise InputError(f"--drafter mtp: {name}: {error}") from error


def tensor_files(name: str, revision: str | None = None) -> dict[str, Path]:
    """The file of each tensor of a target. name: a directory, or a hub id that is in the cache.

    Raises InputError for a target without safetensors files, and for a damaged one.
    """
    # 1. The directory.
    try:
        folder = Path(name)
        if name and not folder.is_dir():
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))

        # 2. Its index, or its only file.
        if name and (folder / INDEX).exists():
            places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            if all(map(inside, places.values())):
                return {tensor: folder / file for tensor, file in places.items()}
        elif name and (folder / SINGLE).exists():
            with safe_open(folder / SINGLE, framework="numpy") as stored:
                return dict.fromkeys(stored.keys(), folder / SINGLE)
    except Exception as error:  # a damaged file may raise anything
        raise InputError(
            f"--drafter mtp: cannot read the safetensors files of {name}: {first_line(error)}"
        ) from error
    raise InputError(
        f"--drafter mtp reads the target's own safetensors files, {name or 'this model object'} "
        "has none: name a directory or a hub id with them"
    )


def read_tensors(
    files: Mapping[str, Path], names: Mapping[str, str], block: tuple[int, int]
) -> dict[str, "Tensor"]:
    """Tensors by our names; experts joined, and fp8 weights in float32.

    names: ours -> the file's. block: rows and columns of an fp8 weight that share a factor. Raises InputError.
    """
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for ours, name in names.items():
        by_file[files[name]].append(ours)
    tensors: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        try:
            with safe_open(file, framework="pt") as stored:
                tensors |= {ours: stored.get_tensor(names[ours]) for ours in wanted}
        except Exception as error:  # safetensors raises what the header's bytes lead to
            raise InputError(f"--drafter mtp: cannot read {file}: {first_line(error)}") from error
    return joined_experts(dequantised(tensors, block))


def dequantised(tensors: Mapping[str, "Tensor"], block: tuple[int, int]) -> dict[str, "Tensor"]:
    """fp8 weights times their factors, in float32; all other tensors as they are."""
    plain = {name: value for name, value in tensors.items() if not name.endswith(SCALE)}
    for name, scales in tensors.items():
        weight = plain.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and weight is not None:
            factors = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            rows, columns = weight.shape
            plain[name.removesuffix(SCALE)] = weight.float() * factors[:rows, :columns]
    return plain


def joined_experts(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Experts as transformers' layers hold them, where a file has a tensor for each.

    gate_proj and up_proj [I, H] of E experts become gate_up_proj [E, 2 I, H], and down_proj
    [H, I] becomes [E, H, I]. Experts that lack a part stay as they are.
    """
    from torch import cat, stack

    # 1. {start of the names: {number: {part: weight}}}.
    experts: defaultdict[str, defaultdict[int, dict[str, Tensor]]]
    experts = defaultdict(lambda: defaultdict(dict))
    rest = {}
    for name, value in tensors.items():
        if found := EXPERT.fullmatch(name):
            experts[found[1]][int(found[2])][found[3]] = value
        else:
            rest[name] = value

    # 2. One tensor of all.
    for start, by_number in experts.items():
        parts = [by_number[number] for number in sorted(by_number)]
        if any(len(part) < 3 for part in parts) or sorted(by_number) != list(range(len(parts))):
            rest |= {name: value for name, value in tensors.items() if name.startswith(start)}
            continue
        both = [cat([part["gate_proj"], part["up_proj"]]) for part in parts]
        rest[f"{start}gate_up_proj"] = stack(both)
        rest[f"{start}down_proj"] = stack([part["down_proj"] for part in parts])
    return rest
