"""Where rows come from: a file, a folder of files, or a data set of the hub.

A file is JSONL, a JSON list or parquet, each also packed with gzip. Its first bytes tell which.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from treespec.errors import InputError
from treespec.text import hub_rows, parquet
from treespec.text.archives import refuse_archive

SUFFIXES = (".jsonl", ".json", ".parquet")  # of the files of a folder, also with .gz behind


def entries(source: str | Path) -> Iterator[tuple[str, object]]:
    """(place, entry) of all rows, such as ("chats.jsonl:7", b'{"messages": …}').

    An entry is the bytes of a JSONL line, or the value itself. Raises InputError for a source that
    is not there, is damaged, or needs a package that is not installed.
    """
    if name := hub_name(source):
        yield from hub_rows.rows(name)
        return
    path = Path(source).expanduser()
    if not path.is_dir():
        yield from _entries_of_file(path, path.name)
        return
    for file in files_of(path):
        yield from _entries_of_file(file, str(file.relative_to(path)))


def digest(source: str | Path) -> str:
    """What tells data apart: SHA-256 of a file, or of a folder's files; the commit of a data set.

    Raises InputError where it cannot be read.
    """
    if name := hub_name(source):
        return hub_rows.digest(name)
    path = Path(source).expanduser()
    try:
        if not path.is_dir():
            return sha256(path)
        files = {str(file.relative_to(path)): sha256(file) for file in files_of(path)}
    except OSError as error:
        raise InputError(
            f"cannot read {source}: {error.strerror or error}; give a JSONL file"
        ) from error
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def size(source: str | Path) -> int | None:
    """Bytes of a file or of a folder's files; None for a data set of the hub."""
    if hub_name(source):
        return None
    path = Path(source).expanduser()
    return sum(file.stat().st_size for file in (files_of(path) if path.is_dir() else [path]))


def hub_name(source: str | Path) -> str | None:
    """The source as the name of a data set of the hub; None where it is a path."""
    name = str(source)
    is_file = any(suffix in SUFFIXES for suffix in Path(name).suffixes)
    if Path(name).expanduser().exists() or is_file or not hub_rows.FORM.fullmatch(name):
        return None
    return name


def files_of(folder: Path) -> list[Path]:
    """The data files of a folder and of its subfolders, in the order of their names.

    Hidden ones do not count. Raises InputError where there is none.
    """
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.name.removesuffix(".gz").endswith(SUFFIXES)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    if not files:
        saved = list(folder.rglob("*.arrow"))
        why = f"; {saved[0].name} is of save_to_disk: write it with to_parquet" if saved else ""
        raise InputError(f"{folder} holds no file named *{', *'.join(SUFFIXES)}{why}")
    return files


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries_of_file(path: Path, name: str) -> Iterator[tuple[str, object]]:
    """name: what places call the file."""
    try:
        with _opened(path) as file:
            # 1. Which form it has. An archive is refused.
            head = file.read(4096)
            file.seek(0)
            if head.startswith(parquet.MAGIC):
                yield from parquet.rows(path, file, name)
                return
            refuse_archive(path, head)
            head = head.removeprefix(b"\xef\xbb\xbf").lstrip()

            # 2. A JSON list as a whole, or JSON line by line.
            if head.startswith(b"["):
                listed = json.loads(file.read())
                yield from ((f"{name} entry {i}", entry) for i, entry in enumerate(listed, 1))
            else:
                for i, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{name}:{i}", line.removeprefix(b"\xef\xbb\xbf")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is a damaged gzip archive: {error}; fetch it again") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} begins as a JSON list but is not valid JSON: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    """A file to read, unpacked if it is a gzip archive."""
    file = path.open("rb")
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not packed:
        return file
    file.close()
    return cast(IO[bytes], gzip.open(path))
