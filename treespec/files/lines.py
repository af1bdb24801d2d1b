"""JSON lines files with a checksum per line, for results that must survive a kill.

Each line is flushed to the disk before work continues, so a kill loses at most the last one.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, final

from treespec.errors import InputError, describe_os_error
from treespec.files.atomic import Fields, add_checksum, verify_checksum, write_text


@final
class Lines:
    """A JSON lines file, opened by `opened`.

    The file is unbuffered: with a buffer, closing it on a full disk would write again, and raise a second error.

    Attributes:
        path: path of the file.
        file: the open file.
        done: the objects of all lines.
    """

    def __init__(self, path: Path, file: BinaryIO, done: list[Fields]) -> None:
        self.path = path
        self.file = file
        self.done = done

    def append(self, fields: Mapping[str, object]) -> None:
        """Append an object with its checksum, and flush it to the disk.

        Raises: InputError if the disk is full; earlier lines are kept.
        """
        unwritten = (json.dumps(add_checksum(fields), ensure_ascii=False) + "\n").encode()
        try:
            while unwritten:
                unwritten = unwritten[self.file.write(unwritten) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {describe_os_error(error)}; the lines before this one "
                "are kept: make room, and repeat the command to go on"
            ) from error
        self.done.append({**fields})

    def sort(self, key: Callable[[Fields], int]) -> None:
        """Sort the lines, which are complete: nothing is appended afterwards. The file is replaced as a whole."""
        done = sorted(self.done, key=key)
        if done == self.done:
            return
        lines = [json.dumps(add_checksum(fields), ensure_ascii=False) + "\n" for fields in done]
        write_text(self.path, "".join(lines))
        self.done = done


@contextmanager
def opened(path: str | Path) -> Iterator[Lines]:
    """Open a file to append lines. An incomplete last line, which a kill left, is cut off first.

    Raises: InputError for any other damaged line.
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
    """Parse the lines of a file, without an incomplete last line.

    Returns: (objects, size of their lines in bytes).

    Raises: InputError, with the line's number, for a damaged line before the last.
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
