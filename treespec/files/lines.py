"""Files that grow line by line: JSON objects with checksums.

Each line is on the disk before work goes on, so a kill loses at most the last one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, final

from treespec.errors import InputError, describe_os_error
from treespec.files.atomic import Fields, add_checksum, verify_checksum


@final
class Lines:
    """A file to which `append` adds lines, made by `opened`. done: the objects that it holds.

    The file has no buffer: closing it would write what a full disk refused, and raise again.
    """

    def __init__(self, path: Path, file: BinaryIO, done: list[Fields]) -> None:
        self.path = path
        self.file = file
        self.done = done

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one object with its checksum: a kill loses at most this line.

        Raises InputError if there is no room; the lines before it are kept.
        """
        left = (json.dumps(add_checksum(fields), ensure_ascii=False) + "\n").encode()
        try:
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {describe_os_error(error)}; the lines before this one "
                "are kept: make room, and repeat the command to go on"
            ) from error
        self.done.append({**fields})


@contextmanager
def opened(path: str | Path) -> Iterator[Lines]:
    """Open a file to append lines, after cutting off a last line that a kill has torn.

    Raises InputError for any other damaged line.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise InputError(f"cannot write {path}: {describe_os_error(error)}") from error
    with file:
        file.seek(0)
        done, end = parse_lines(file.read(), path)
        file.truncate(end)
        yield Lines(path, file, done)


def parse_lines(content: bytes, path: Path) -> tuple[list[Fields], int]:
    """The objects of a file's lines, and their size in bytes, both without a torn last line.

    Raises InputError, with the line's number, for a damaged line before the last.
    """
    lines = content.split(b"\n")
    rows = []
    end = 0
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(verify_checksum(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines) - 1 and not lines[-1]:
                break
            raise InputError(
                f"{path}:{number} is damaged ({error}); delete the line to have it made again"
            ) from error
        end += len(line) + 1
    return rows, end
