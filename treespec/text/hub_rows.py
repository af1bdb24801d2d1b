"""Rows of data sets of the Hugging Face hub, through its library `datasets`."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

from treespec.errors import InputError, first_line
from treespec.text.parquet import chosen, without_nulls

# owner/name, owner/name:split or owner/name:configuration:split
FORM = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
SECONDS = 10.0  # for the hub's answer


def rows(name: str) -> Iterator[tuple[str, object]]:
    """(place, row) of the data set. Raises InputError without the library or the data set."""
    # 1. Load it, from the hub or from the library's cache.
    library = load_library(name)
    repository, configuration, split = parts(name)
    try:
        loaded: Any = library.load_dataset(repository, configuration)
    except Exception as error:  # the library raises whatever the hub or the files gave it
        raise InputError(
            f"no file {name}, and no data set of the hub: {first_line(error)}"
        ) from error

    # 2. Its split.
    splits = list(loaded)
    split = split or (splits[0] if len(splits) == 1 else "train")
    if split not in splits:
        raise InputError(
            f"{repository} has no split {split!r}: give {repository}:SPLIT with one of "
            f"{', '.join(splits)}"
        )

    # 3. The columns that training reads.
    data = loaded[split]
    data = data.select_columns(chosen(name, data.column_names))
    for number, row in enumerate(data, 1):
        yield f"{name} row {number}", without_nulls(row)


def digest(name: str) -> str:
    """The commit of a data set, and what is taken of it. Raises InputError where it is unknown."""
    load_library(name)
    repository, configuration, split = parts(name)
    commit = commit_of(repository)
    return " ".join(["commit", commit, *(part for part in (configuration, split) if part)])


def commit_of(repository: str) -> str:
    """The newest commit of a data set; without the hub, that in its cache."""
    from huggingface_hub import HfApi, scan_cache_dir

    try:
        commit = HfApi().dataset_info(repository, timeout=SECONDS).sha
        if commit:
            return commit
        why = "the hub names no commit"
    except Exception as error:  # in the words of whichever HTTP client the hub's library uses
        why = first_line(error)
    try:
        kept = [known for known in scan_cache_dir().repos if known.repo_type == "dataset"]
    except Exception:  # no cache
        kept = []
    for known in kept:
        if known.repo_id == repository and "main" in known.refs:
            return known.refs["main"].commit_hash
    raise InputError(f"no file or folder {repository}, and the hub does not give it: {why}")


def load_library(name: str) -> Any:
    """The package `datasets`. Raises InputError where it is not installed."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(
            f"there is no file or folder {name}; a data set of the hub needs the package datasets: "
            "pip install 'treespec[data]'"
        ) from error


def parts(name: str) -> tuple[str, str | None, str | None]:
    """(repository, configuration, split); None where the name leaves it open."""
    match = FORM.fullmatch(name)
    assert match
    repository, first, second = match.groups()
    return (repository, first, second) if second else (repository, None, first)
