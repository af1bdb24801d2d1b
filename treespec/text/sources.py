"""Where rows come from: a file, a folder of files, or a data set of the hub.

A file is JSONL, a JSON list or parquet, each also packed with gzip. Its first bytes tell which.
"""

import gzip
import hashlib
import importlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from treespec.errors import InputError, first_line
from treespec.text.entries import FORMS, WITH_ROWS

KINDS = {  # first bytes: (what the file is, what to do)
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"BZh": ("a bzip2 archive", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("an xz archive", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "unpack it with unzstd"),
    b"PAR1": ("a Parquet file", "convert it"),
}


def refuse_archive(path: Path, head: bytes) -> None:
    """Raises InputError for an archive. head: the first bytes of the file."""
    for start, (kind, remedy) in KINDS.items():
        if head.startswith(start):
            raise InputError(f"{path} is {kind}: {remedy}, JSONL is expected")


MAGIC = b"PAR1"  # the first bytes of a file
ROWS = 256  # read at once


def parquet_rows(path: Path, file: IO[bytes], name: str) -> Iterator[tuple[str, object]]:
    """(place, row) of a parquet file, read by pyarrow a few at a time. Only columns that training reads are loaded.

    name: what places call the file. Raises InputError without pyarrow, for a damaged file, and for
    one without a column of conversations.
    """
    # 1. The library.
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path} is a parquet file, which needs pyarrow: pip install 'treespec[data]'"
        ) from error

    # 2. The rows.
    try:
        table = ParquetFile(file)
        columns = chosen(path, table.schema_arrow.names)
        number = 0
        for batch in table.iter_batches(ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{name} row {number}", without_nulls(row)
    except pyarrow.ArrowException as error:
        raise InputError(
            f"{path} is a damaged parquet file: {first_line(error)}; fetch it again"
        ) from error


def chosen(source: object, columns: Sequence[str]) -> list[str]:
    """The columns that training reads. Raises InputError where none of them holds conversations."""
    if not set(columns) & FORMS.keys():
        raise InputError(
            f"{source} has no column of conversations, only {', '.join(sorted(columns))}; "
            f"name it one of {', '.join(FORMS)}"
        )
    return [name for name in columns if name in FORMS or name in WITH_ROWS]


def without_nulls(value: object) -> object:
    """A row without fields that are null: a table gives each row the fields of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(part) for part in value]
    return value


# owner/name, owner/name:split or owner/name:configuration:split
FORM = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
SECONDS = 10.0  # for the hub's answer


def hub_rows(name: str) -> Iterator[tuple[str, object]]:
    """(place, row) of a data set of the hub, through its library `datasets`.

    Raises InputError without the library or the data set.
    """
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


def commit_of(repository: str) -> str:
    """The newest commit of a data set; without the hub, that in its cache. Raises InputError."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return str(HfApi().dataset_info(repository, timeout=SECONDS).sha)
    except Exception as error:  # in the words of whichever HTTP client the hub's library uses
        with suppress(Exception):
            return Path(
                snapshot_download(repository, repo_type="dataset", local_files_only=True)
            ).name
        raise InputError(
            f"no file or folder {repository}, and the hub does not give it: {first_line(error)}"
        ) from error


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


SUFFIXES = (".jsonl", ".json", ".parquet")  # of the files of a folder, also with .gz behind


def entries(source: str | Path) -> Iterator[tuple[str, object]]:
    """(place, entry) of all rows, such as ("chats.jsonl:7", b'{"messages": …}').

    An entry is the bytes of a JSONL line, or the value itself. Raises InputError for a source that
    is not there, is damaged, or needs a package that is not installed.
    """
    if name := hub_name(source):
        yield from hub_rows(name)
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
        load_library(name)
        repository, *chosen_parts = parts(name)
        return " ".join(["commit", commit_of(repository), *filter(None, chosen_parts)])
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
    is_path = is_file or Path(name).expanduser().exists()
    return name if FORM.fullmatch(name) and not is_path else None


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
            if head.startswith(MAGIC):
                yield from parquet_rows(path, file, name)
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
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if packed else path.open("rb")
