"""The files of a head directory, and the names of its tensors, without torch."""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath

from safetensors import safe_open

from treespec.heads import checksum
from treespec.heads.checksum import Fields as Config
from treespec.heads.hub import only_cached
from treespec.heads.places import mistyped

FILES = (  # `read_tensors` takes the first that exists
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


def tensor_names(folder: Path) -> set[str] | None:
    """The names that `read_tensors` returns, from a header alone; None for a file without one."""
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None or file.suffix != ".safetensors":
        return None
    try:
        with safe_open(file, framework="numpy") as stored:
            return set(stored.keys())
    except Exception:  # damaged: `read_tensors` says how
        return None


def inside(name: str) -> bool:
    """Whether a name in an index stays in its folder; links may leave it, as in the hub's cache."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not any(path.anchor or ".." in path.parts for path in paths)


def head_folder(path: str | Path) -> Path:
    """The directory itself, or a local copy of the hub repository.

    Raises HeadError where there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return latest_checkpoint(folder) or folder
    local = cached_alone(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=local))
    except Exception as error:  # of many kinds; its first line gives the reason
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadError(f"no directory {path}, and the hub did not give it: {line}") from error


def cached_alone(path: str | Path) -> bool:
    """Whether a hub repository is to be read from the cache. Raises HeadError where there is none."""
    if problem := mistyped(path, "head directory"):
        raise HeadError(problem)
    if str(path).count("/") != 1:
        raise HeadError(f"no head directory at {path}, and hub ids are of the form OWNER/NAME")
    try:
        return only_cached(str(path))
    except ValueError as error:
        raise HeadError(str(error)) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint of a training run that goes on in a directory without a head yet."""
    if (folder / "config.json").exists():
        return None
    checkpoints = folder.glob("training/checkpoint-*/config.json")
    folders = [file.parent for file in checkpoints]
    return max(folders, key=lambda path: (len(path.name), path.name), default=None)


def config_of(folder: Path) -> Config:
    """The fields of config.json without its checksum."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadError(
            f"{folder} is not a head directory: it has no readable config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{file} is not JSON: {error}; fetch or train the head again") from error
    if not isinstance(config, dict):
        raise HeadError(f"{file} holds no fields: it is the configuration of no head")
    if not checksum.intact(config):
        raise HeadError(
            f"{file} is not as it was written, its checksum does not match: fetch or train the "
            f"head again, or, if you have edited it, delete its field {checksum.FIELD!r}"
        )
    config.pop(checksum.FIELD, None)
    return config


def check_files(path: str) -> None:
    """Raises HeadError for a head whose config.json or file of tensors is missing or damaged.

    Of a file of tensors it reads the header alone. Of a hub id it checks the name.
    """
    if not Path(path).expanduser().is_dir():
        cached_alone(path)
        return
    folder = head_folder(path)
    config_of(folder)
    file = tensor_file(folder)
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy"):
                pass
        except Exception as error:  # safetensors raises what its header's bytes lead to
            raise damaged(file, error) from error


def tensor_file(folder: Path) -> Path:
    """The first of FILES that exists. Raises HeadError where there is none."""
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None:
        names = [name for name in FILES[2:] if "index" not in name]
        raise HeadError(f"{folder} has neither {FILES[0]} nor {', '.join(names)}")
    return file


def damaged(file: Path, error: Exception) -> HeadError:
    """The error of a file that cannot be read."""
    return HeadError(f"{file} is damaged: {error}; fetch or train the head again")


def check_new(out: Path) -> None:
    """Raises HeadError for a folder that holds anything, and for a file."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadError(f"{out} exists already: name a new folder")
