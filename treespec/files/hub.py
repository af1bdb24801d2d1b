"""Decide whether a name is a directory, a mistyped directory or a hub id, and whether the hub can be reached.

Only the disk decides what a name is. Whether the hub or its cache holds a repository is decided within 10 seconds; the
hub's client takes 23.
"""

import os
from functools import cache
from pathlib import Path

from treespec.errors import InputError, find_similar_name, get_first_line

HUB_TIMEOUT_SECONDS = 10.0  # for the first response of the hub


def explain_missing(name: str | Path, what: str = "directory") -> str | None:
    """Explain why a name is neither a directory nor a hub id, and suggest a similar path; None if it may be a hub id.

    A name counts as a path if it looks like one, or if a directory with a similar name exists.

    what: the kind of directory in the message, such as "head directory".
    """
    path = Path(name).expanduser()
    text = str(name)
    if path.is_file():
        problem = f"{name} is a file, not a {what}"
        if path.suffix == ".gguf":
            problem += ": name its folder, and the file by --load-in gguf:FILE"
        return problem
    similar = find_nearest_path(path)
    if text and not is_path_like(text) and (similar is None or is_cached(text)):
        return None
    if similar is None:
        return f"no {what} at {name}"
    return f"no {what} at {name}; did you mean {similar}?"


def is_path_like(name: str) -> bool:
    """Whether a name can only be a path. False for a possible hub id, such as owner/name."""
    if name.startswith((".", "/", "~")) or name.endswith("/"):
        return True
    return name.count("/") > 1


def find_nearest_path(path: Path) -> Path | None:
    """Replace each missing component of a path by the most similar directory; None if one has no similar directory."""
    existing_path = Path(path.anchor)
    for part in path.parts:
        if not (existing_path / part).is_dir():
            directories = next(os.walk(existing_path), ("", [], []))[1]
            similar = find_similar_name(part, directories)
            if similar is None:
                return None
            part = similar
        existing_path /= part
    return existing_path


def is_cached(name: str, revision: str | None = None) -> bool:
    """Whether the hub's cache holds a model repository: one with a config.json or a GGUF file.

    revision: branch or commit. Default: None, the main branch.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    if (folder / "config.json").is_file():
        return True
    return any(folder.glob("**/*.gguf"))


@cache
def is_hub_unreachable(name: str, revision: str | None = None) -> bool:
    """Whether to load a repository from the cache only, because the hub cannot be reached.

    Args:
        name: owner/name.
        revision: branch or commit. Default: None, the main branch.

    Raises: ValueError if neither the cache nor the hub has the repository.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    # 1. Ask the hub with one request, without retries.
    try:
        get_hf_file_metadata(
            hf_hub_url(name, "config.json", revision=revision), timeout=HUB_TIMEOUT_SECONDS
        )
        return False

    # 2. The hub responded, but has no such repository.
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name} and log in"
        ) from error
    except (RepositoryNotFoundError, HFValidationError):
        problem = (
            f"{name} is neither a directory nor a repository of the hub (private ones take `hf "
            "auth login`)"
        )
    except HfHubHTTPError:
        return False  # loading raises a better error: what is missing, or why the hub refuses

    # 3. There is no network. The class of the error depends on the HTTP client of the hub's library.
    except Exception:
        reason = "the hub cannot be reached"
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        missing = "it"
        if revision and is_cached(name):
            missing = f"revision {revision} of it"
        problem = f"no directory {name}; as a hub id {missing} is not in the cache, and {reason}"
    if is_cached(name, revision):
        return True
    raise ValueError(problem)


def check_push(name: str) -> None:
    """Raises InputError if a repository cannot be pushed to, because the hub cannot be reached or knows no login."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # of many classes; the first line of the message has the reason
        raise InputError(
            f"--push {name}: the hub cannot be written to ({get_first_line(error)}); nothing was exported"
        ) from error


def push(folder: Path, name: str) -> str:
    """Upload a folder to a model repository, which is created if necessary. Returns the repository's address.

    Raises: InputError with the hub's reason.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = str(api.create_repo(name, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # of many classes; the first line of the message has the reason
        raise InputError(
            f"{name} was not pushed, {folder} is there: {get_first_line(error)}"
        ) from error
    return address
