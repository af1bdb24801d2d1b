"""The files in a head's folder, and what they say without torch: config.json, tensors' names, number of levels."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from safetensors import safe_open

from treespec.errors import InputError, get_first_line
from treespec.files.atomic import CHECKSUM_FIELD, read_about, read_json
from treespec.files.atomic import Fields as Config
from treespec.files.hub import explain_missing, is_hub_unreachable

PRETRAINED_HEADS = Path(__file__).with_name("pretrained")  # heads that come with treespec
GGUF_FILE = "model.gguf"  # llama.cpp's, beside a config.json
FETCH_AGAIN_ADVICE = "fetch or train the head again"
TENSOR_FILES = (  # names of files of tensors; the first that exists is read
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    GGUF_FILE,
)
P_EAGLE_LEVELS = 8  # levels that SpecForge and speculators train P-EAGLE heads with
WHOLE_MODEL_PREFIX = "medusa_head."  # prefix of the heads' tensors in a whole model
HYDRA_PATTERN = r"hydra_mlp\.(\d+)\."  # group 1 is the number of the head
VLLM_BLOCK_PATTERN = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's names of Medusa's blocks


def find_head_folder(path: str | Path) -> Path:
    """Find a head's directory, or download the hub repository.

    For the directory of a training run that has not ended yet, it is the latest checkpoint. Raises
    InputError if there is neither a directory nor a repository.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").exists():
            return folder
        checkpoints = [file.parent for file in folder.glob("training/checkpoint-*/config.json")]
        return max(checkpoints, key=lambda path: (len(path.name), path.name), default=folder)
    local = is_cached_only(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=local))
    except Exception as error:  # of many types; the first line says the reason
        raise InputError(
            f"no directory {path}, and the hub did not give it: {get_first_line(error)}"
        ) from error


def is_cached_only(path: str | Path) -> bool:
    """Whether to read a hub repository from the cache, because the hub cannot be reached.

    Raises InputError if the path is no hub id, or the repository is not in the cache then.
    """
    problem = explain_missing(path, "head directory")
    if problem:
        raise InputError(problem)
    if str(path).count("/") != 1:
        raise InputError(f"no head directory at {path}, and hub ids are of the form OWNER/NAME")
    try:
        return is_hub_unreachable(str(path))
    except ValueError as error:
        raise InputError(str(error)) from error


def read_head_config(folder: Path) -> Config:
    """Read the fields of config.json, without its checksum. Raises InputError for a damaged file."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} is not a head directory: it has no config.json")
    edited = f"or, if you have edited it, delete its field {CHECKSUM_FIELD!r}"
    return read_json(file, f"{FETCH_AGAIN_ADVICE}, {edited}")


def find_tensor_file(folder: Path) -> Path:
    """Find the first file of `TENSOR_FILES` that exists. Raises InputError if there is none."""
    for name in TENSOR_FILES:
        if (folder / name).exists():
            return folder / name
    names = [name for name in TENSOR_FILES[2:] if "index" not in name]
    raise InputError(f"{folder} has neither {TENSOR_FILES[0]} nor {', '.join(names)}")


def is_inside_folder(name: str) -> bool:
    """Whether a name in an index stays in its folder. Links may lead out, as in the hub's cache."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.anchor or ".." in path.parts for path in paths)


def check_head_files(path: str) -> None:
    """Raises InputError for a head without a readable config.json or file of tensors.

    This reads only the header of the tensors' file. Of a hub id it checks only the name.
    """
    if not Path(path).expanduser().is_dir():
        is_cached_only(path)
        return
    folder = find_head_folder(path)
    read_head_config(folder)
    file = find_tensor_file(folder)
    if file.suffix == ".safetensors":
        read_about(file, FETCH_AGAIN_ADVICE)


def read_config_and_names(folder: Path) -> tuple[Config, set[str] | None]:
    """Read a head's config.json and its tensors' names; ({}, None) for missing files, damaged ones and pickles."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        file = find_tensor_file(folder)
        if file.suffix != ".safetensors" or not isinstance(config, dict):
            return {}, None
        with safe_open(file, framework="numpy") as tensor_file:
            names = set(tensor_file.keys())
            return config, {strip_wrappers(name) for name in names}
    except Exception:  # missing or damaged: loading raises the error for the user
        return {}, None


def strip_wrappers(name: str) -> str:
    """Remove the prefixes that training's wrappers put before a tensor's name: `model.`, `module.`, `_orig_mod.`"""
    return re.sub(r"^((model|module)\.)+", "", name.replace("_orig_mod.", ""))


def check_new(out: Path) -> None:
    """Raises InputError unless `out` does not exist or is an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: name a new folder")


def count_medusa_levels(config: Config, names: Iterable[str]) -> int:
    """Count Medusa's heads: the largest of the tensors' and the config's numbers.

    Raises TypeError if a field of the config holds no number.
    """
    stored_heads = count_numbered_heads(
        VLLM_BLOCK_PATTERN.sub("", name.removeprefix(WHOLE_MODEL_PREFIX)) for name in names
    )
    return max(stored_heads, config.get("num_heads", 0), config.get("medusa_num_heads", 0))


def count_numbered_heads(names: Iterable[str], pattern: str = r"(\d+)\.") -> int:
    """Count heads by their tensors' names: one more than the largest number that `pattern` finds."""
    count = 0
    for name in names:
        numbered = re.match(pattern, name)
        if numbered:
            count = max(count, int(numbered[1]) + 1)
    return count


def count_hydra_levels(config: Config, names: Iterable[str]) -> int:
    """Count Hydra's heads by the config, or else by the tensors' names."""
    return int(config.get("hydra_num_heads", count_numbered_heads(names, HYDRA_PATTERN)))


def count_p_eagle_levels(config: Config, names: Collection[str] = ()) -> int:
    """Count a P-EAGLE head's levels: treespec's field, else speculators', else `P_EAGLE_LEVELS`."""
    levels = config.get("levels")
    nested = config.get("speculators_config") or {}
    methods = nested.get("proposal_methods")
    if not levels and methods:
        levels = methods[0].get("speculative_tokens")
    return int(levels or P_EAGLE_LEVELS)


def count_dflash_levels(config: Config, names: Collection[str]) -> int:
    """Count the levels that a DFlash head drafts. Raises KeyError if its config has no block size."""
    size = config.get("block_size")
    if not size:
        size = config["dflash_config"]["block_size"]
    return int(size) - (not config.get("sample_from_anchor"))


def count_dspark_levels(config: Config, names: Collection[str]) -> int:
    """Count the levels that a DSpark head drafts, as `count_dflash_levels`.

    A file that does not say whether the last token's row drafts is taken to say yes; its reader looks closer.
    """
    nested = config.get("dflash_config", {})
    from_anchor = config.get("sample_from_anchor", nested.get("sample_from_anchor", True))
    return count_dflash_levels(config | {"sample_from_anchor": from_anchor}, names)


def count_domino_levels(config: Config, names: Collection[str]) -> int:
    """Count the levels that a Domino head drafts, as `count_dflash_levels`."""
    nested = config.get("dflash_config", {})
    shifted = nested.get("shift_label", config.get("shift_label"))
    return count_dflash_levels({"sample_from_anchor": shifted} | config, names)
