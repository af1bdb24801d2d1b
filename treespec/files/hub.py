"""Is a name a directory, a mistyped directory or a hub id, and can the hub be reached?

Only the disk decides what a name is. Whether the hub or its cache holds a repository is known within
10 s; the hub's own client takes 23 s.
"""

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from treespec.errors import InputError, get_first_line

HUB_TIMEOUT_SECONDS = 10.0  # for the hub's first answer


def explain_missing(name: str | Path, what: str = "directory") -> str | None:
    """Why a name is neither a directory nor a hub id, with the most similar name; None: a hub id.

    what: the word for the directory in the message, such as "head directory". A name counts as a
    path if it looks like one, or if a directory beside it has a similar name.
    """
    path = Path(name).expanduser()
    text = str(name)
    if path.is_file():
        problem = f"{name} is a file, not a {what}"
        if path.suffix == ".gguf":
            problem += ": name its folder, and the file by --load-in gguf:FILE"
        return problem
    similar = find_nearest_path(path)
    if text and not looks_like_path(text) and (similar is None or is_cached(text)):
        return None
    if similar is None:
        return f"no {what} at {name}"
    return f"no {what} at {name}; did you mean {similar}?"


def looks_like_path(name: str) -> bool:
    """False for a name that may be a hub id, such as owner/name."""
    if name.startswith((".", "/", "~")) or name.endswith("/"):
        return True
    return name.count("/") > 1


def find_nearest_path(path: Path) -> Path | None:
    """The path with each missing component replaced by the most similar directory in its place."""
    there = Path(path.anchor)
    for part in path.parts:
        if not (there / part).is_dir():
            beside = next(os.walk(there), ("", [], []))[1]
            similar = get_close_matches(part, beside, n=1)
            if not similar:
                return None
            part = similar[0]
        there /= part
    return there


def is_cached(name: str, revision: str | None = None) -> bool:
    """Whether the hub's cache holds a repository of that name. revision: default the main branch.

    It holds a config.json, or no more than a GGUF file, which brings its own.
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
    """Whether to load a repository only from the cache, because the hub cannot be reached.

    revision: default the main branch. Raises ValueError for a name that neither the cache nor the
    hub has.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    # 1. Ask the hub with one request, never repeated.
    try:
        get_hf_file_metadata(
            hf_hub_url(name, "config.json", revision=revision), timeout=HUB_TIMEOUT_SECONDS
        )
        return False

    # 2. The hub answered, but it gives no such repository.
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
        return False  # the loader says better what is missing, or why the hub refuses

    # 3. No network: each HTTP client that the hub's library may use raises errors of its own.
    except Exception:
        why = "the hub cannot be reached"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        missing = "it"
        if revision and is_cached(name):
            missing = f"revision {revision} of it"
        problem = f"no directory {name}; as a hub id {missing} is not in the cache, and {why}"
    if is_cached(name, revision):
        return True
    raise ValueError(problem)


def push(folder: Path, name: str) -> str:
    """Upload a folder into a model repository, new or known. Returns its address.

    Raises InputError with the hub's reason.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = str(api.create_repo(name, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"{name} was not pushed, {folder} is there: {get_first_line(error)}"
        ) from error
    return address
