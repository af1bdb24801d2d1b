"""The folder of a head: its files, config.json, names of tensors and its depth, without torch."""

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
TENSOR_FILES = (  # of tensors: the first that exists
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    GGUF_FILE,
)
P_EAGLE_LEVELS = 8  # with which both projects train P-EAGLE heads
WHOLE_MODEL_PREFIX = "medusa_head."  # before the names in a whole model
HYDRA_PATTERN = r"hydra_mlp\.(\d+)\."  # the number of a head
VLLM_BLOCK_PATTERN = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's


def find_head_folder(path: str | Path) -> Path:
    """The directory itself, or a local copy of the hub repository.

    A training run that goes on has no head yet: its latest checkpoint stands for it. Raises
    InputError where there is neither.
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
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"no directory {path}, and the hub did not give it: {get_first_line(error)}"
        ) from error


def is_cached_only(path: str | Path) -> bool:
    """Whether a hub repository is to be read from the cache, without asking the hub.

    Raises InputError where there is none.
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
    """The fields of config.json without its checksum. Raises InputError for a damaged file."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} is not a head directory: it has no config.json")
    edited = f"or, if you have edited it, delete its field {CHECKSUM_FIELD!r}"
    return read_json(file, f"{FETCH_AGAIN_ADVICE}, {edited}")


def find_tensor_file(folder: Path) -> Path:
    """The first of FILES that exists. Raises InputError where there is none."""
    for name in TENSOR_FILES:
        if (folder / name).exists():
            return folder / name
    names = [name for name in TENSOR_FILES[2:] if "index" not in name]
    raise InputError(f"{folder} has neither {TENSOR_FILES[0]} nor {', '.join(names)}")


def is_inside_folder(name: str) -> bool:
    """Whether a name in an index stays in its folder; links may leave it, as in the hub's cache."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.anchor or ".." in path.parts for path in paths)


def check_head_files(path: str) -> None:
    """Raises InputError for a head whose config.json or file of tensors is missing or damaged.

    It reads only the header of a file of tensors, and checks only the name of a hub id.
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
    """A head's config.json and its tensors' names; ({}, None) where the files do not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        file = find_tensor_file(folder)
        if file.suffix != ".safetensors" or not isinstance(config, dict):
            return {}, None
        with safe_open(file, framework="numpy") as stored:
            names = set(stored.keys())
            return config, {strip_wrappers(name) for name in names}
    except Exception:  # missing or damaged: loading says how
        return {}, None


def strip_wrappers(name: str) -> str:
    """A tensor's name without what training's wrappers put before it: `model.`, `module.`, `_orig_mod.`"""
    return re.sub(r"^((model|module)\.)+", "", name.replace("_orig_mod.", ""))


def check_new(out: Path) -> None:
    """Raises InputError for a folder that holds anything, and for a file."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: name a new folder")


def count_medusa_levels(config: Config, names: Iterable[str]) -> int:
    """The number of heads that `read` finds. Raises TypeError where the config says no number."""
    stored = count_numbered_heads(
        VLLM_BLOCK_PATTERN.sub("", name.removeprefix(WHOLE_MODEL_PREFIX)) for name in names
    )
    return max(stored, config.get("num_heads", 0), config.get("medusa_num_heads", 0))


def count_numbered_heads(names: Iterable[str], pattern: str = r"(\d+)\.") -> int:
    """The number of heads, one more than the largest number that begins a name."""
    count = 0
    for name in names:
        numbered = re.match(pattern, name)
        if numbered:
            count = max(count, int(numbered[1]) + 1)
    return count


def count_hydra_levels(config: Config, names: Iterable[str]) -> int:
    """The number of heads, by the config or the names of the tensors."""
    return int(config.get("hydra_num_heads", count_numbered_heads(names, HYDRA_PATTERN)))


def count_p_eagle_levels(config: Config, names: Collection[str] = ()) -> int:
    """Levels of a P-EAGLE head: its own field, what speculators says, or else `P_EAGLE_LEVELS`."""
    levels = config.get("levels")
    nested = config.get("speculators_config") or {}
    methods = nested.get("proposal_methods")
    if not levels and methods:
        levels = methods[0].get("speculative_tokens")
    return int(levels or P_EAGLE_LEVELS)


def count_dflash_levels(config: Config, names: Collection[str]) -> int:
    """Levels that a DFlash head drafts. Raises KeyError where its config does not tell."""
    size = config.get("block_size") or config["dflash_config"]["block_size"]
    return int(size) - (not config.get("sample_from_anchor"))
