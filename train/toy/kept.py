"""Folders that the quickstart makes once and keeps: whole or absent, their files with checksums."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treespec.errors import InputError
from treespec.files import new_folder, read_json, remove_leftovers, write_json

CHECKSUMS = "checksums.json"


@contextmanager
def making(out: Path) -> Iterator[Path]:
    """Yields a folder to fill: it becomes `out` when the block ends, and vanishes if that raises.

    What killed processes left beside it is removed. Raises InputError where there is no room.
    """
    if out.parent.is_dir():
        remove_leftovers(out.parent)
        for left in out.parent.glob(f".{out.name}-????????"):  # of older versions
            shutil.rmtree(left, ignore_errors=True)
    with new_folder(out) as unfinished:
        yield unfinished
        write_json(
            unfinished / CHECKSUMS,
            {file.name: sha256(file) for file in sorted(unfinished.iterdir())},
        )


def kept(out: Path) -> bool:
    """Whether `out` was made before. A folder of an older version has no checksums to verify.

    Raises InputError for a file at its place, and for damaged files in it.
    """
    if not out.exists():
        return False
    if not out.is_dir():
        raise InputError(f"{out} is a file: name another folder")
    if (out / CHECKSUMS).exists():
        remedy = f"delete {out} to make it again"
        for name, expected in read_json(out / CHECKSUMS, remedy).items():
            if not (out / name).is_file() or sha256(out / name) != expected:
                raise InputError(f"{out / name} is missing or damaged: {remedy}")
    return True


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
