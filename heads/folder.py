"""The folder of a head: its files, config.json, names of tensors and its depth, without torch."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from safetensors import safe_open

from treespec.errors import InputError, first_line
from treespec.files.atomic import CHECKSUM, read_about, read_json
from treespec.files.atomic import Fields as Config
from treespec.files.hub import mistyped, only_cached

PRETRAINED = Path(__file__).with_name("pretrained")  # heads that come with treespec
GGUF = "model.gguf"  # llama.cpp's, beside a config.json
AGAIN = "fetch or train the head again"
FILES = (  # of tensors: the first that exists
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    GGUF,
)
P_EAGLE_LEVELS = 8  # with which both projects train P-EAGLE heads
WHOLE = "medusa_head."  # before the names in a whole model
HYDRA = r"hydra_mlp\.(\d+)\."  # the number of a head
BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.")  # vLLM's


def head_folder(path: str | Path) -> Path:
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
    local = cached_alone(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=local))
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"no directory {path}, and the hub did not give it: {first_line(error)}"
        ) from error


def cached_alone(path: str | Path) -> bool:
    """Whether a hub repository is to be read from the cache, without asking the hub.

    Raises InputError where there is none.
    """
    problem = mistyped(path, "head directory")
    if problem:
        raise InputError(problem)
    if str(path).count("/") != 1:
        raise InputError(f"no head directory at {path}, and hub ids are of the form OWNER/NAME")
    try:
        return only_cached(str(path))
    except ValueError as error:
        raise InputError(str(error)) from error


def config_of(folder: Path) -> Config:
    """The fields of config.json without its checksum. Raises InputError for a damaged file."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} is not a head directory: it has no config.json")
    edited = f"or, if you have edited it, delete its field {CHECKSUM!r}"
    return read_json(file, f"{AGAIN}, {edited}")


def tensor_file(folder: Path) -> Path:
    """The first of FILES that exists. Raises InputError where there is none."""
    for name in FILES:
        if (folder / name).exists():
            return folder / name
    names = [name for name in FILES[2:] if "index" not in name]
    raise InputError(f"{folder} has neither {FILES[0]} nor {', '.join(names)}")


def inside(name: str) -> bool:
    """Whether a name in an index stays in its folder; links may leave it, as in the hub's cache."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.anchor or ".." in path.parts for path in paths)


def check_files(path: str) -> None:
    """Raises InputError for a head whose config.json or file of tensors is missing or damaged.

    It reads only the header of a file of tensors, and checks only the name of a hub id.
    """
    if not Path(path).expanduser().is_dir():
        cached_alone(path)
        return
    folder = head_folder(path)
    config_of(folder)
    file = tensor_file(folder)
    if file.suffix == ".safetensors":
        read_about(file, AGAIN)


def written(folder: Path) -> tuple[Config, set[str] | None]:
    """A head's config.json and its tensors' names; ({}, None) where the files do not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        file = tensor_file(folder)
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


def medusa_levels(config: Config, names: Iterable[str]) -> int:
    """The number of heads that `read` finds. Raises TypeError where the config says no number."""
    stored = medusa_heads(BLOCK.sub("", name.removeprefix(WHOLE)) for name in names)
    return max(stored, config.get("num_heads", 0), config.get("medusa_num_heads", 0))


def medusa_heads(names: Iterable[str], pattern: str = r"(\d+)\.") -> int:
    """The number of heads, one more than the largest number that begins a name."""
    count = 0
    for name in names:
        numbered = re.match(pattern, name)
        if numbered:
            count = max(count, int(numbered[1]) + 1)
    return count


def hydra_levels(config: Config, names: Iterable[str]) -> int:
    """The number of heads, by the config or the names of the tensors."""
    return int(config.get("hydra_num_heads", medusa_heads(names, HYDRA)))


def p_eagle_levels(config: Config, names: Collection[str] = ()) -> int:
    """Levels of a P-EAGLE head: its own field, what speculators says, or else `P_EAGLE_LEVELS`."""
    levels = config.get("levels")
    nested = config.get("speculators_config") or {}
    methods = nested.get("proposal_methods")
    if not levels and methods:
        levels = methods[0].get("speculative_tokens")
    return int(levels or P_EAGLE_LEVELS)


def dflash_levels(config: Config, names: Collection[str]) -> int:
    """Levels that a DFlash head drafts. Raises KeyError where its config does not tell."""
    size = config.get("block_size") or config["dflash_config"]["block_size"]
    return int(size) - (not config.get("sample_from_anchor"))
