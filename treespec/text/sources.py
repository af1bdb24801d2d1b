"""Read rows from a file, a folder of files, a data set that `datasets` saved, or a data set of the hub.

A file is JSONL, a JSON list or parquet, each optionally packed with gzip or zstd, as its first bytes say.
"""

import gzip
import hashlib
import importlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

from treespec.errors import InputError, get_first_line
from treespec.files.distribution import check_extra
from treespec.text.entries import ROW_FIELDS, WITH_ROWS

PARQUET_BATCH_ROWS = 256  # rows of a parquet file that are read at once
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of UTF-8 files
# first bytes of packed files
GZIP_START = b"\x1f\x8b"
ZSTD_START = b"\x28\xb5\x2f\xfd"
PARQUET_START = b"PAR1"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")  # of the files that are read from a folder
FILE_ENDINGS = tuple(suffix + packed for suffix in DATA_SUFFIXES for packed in ("", ".gz", ".zst"))
# owner/name, owner/name:split or owner/name:configuration:split
HUB_NAME_PATTERN = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")


def iterate_entries(source: str | Path) -> Iterator[tuple[str, object]]:
    """Yield (position, row) of all rows of a source, such as ("chats.jsonl:7", b'{"messages": …}').

    A row is the bytes of a JSONL line, or the parsed value.

    Raises: InputError for a source that is missing or damaged, or needs a package that is not installed.
    """
    name = get_hub_name(source)
    if name:
        yield from _iterate_hub_rows(name)
        return
    folder = Path(source).expanduser()
    if is_saved(folder):
        yield from _read_saved(folder)
        return
    for name, path in list_data_files(source).items():
        try:
            with _open_unpacked(path) as file:
                head = file.read(4096)
            with _open_unpacked(path) as file:
                yield from _iterate_file_rows(path, file, head, name)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"cannot read {path}: {get_first_line(error)}; fetch it again"
            ) from error


def _open_unpacked(path: Path) -> Any:
    """Open a file, unpacked if it is packed. Raises InputError if that needs a package that is not installed."""
    with path.open("rb") as file:
        start = file.read(len(ZSTD_START))
    if start == ZSTD_START:
        return open_zstd(path)
    if start.startswith(GZIP_START):
        return gzip.open(path)
    return path.open("rb")


def open_zstd(path: Path) -> BufferedReader:
    """Open a file packed with zstd, through pyarrow. Reading a damaged or cut file raises OSError.

    Raises: InputError if pyarrow is not installed.
    """
    check_extra("data", f"{path} is packed with zstd, which", "pyarrow")
    import pyarrow

    return BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


def _iterate_file_rows(
    path: Path, file: Any, head: bytes, name: str
) -> Iterator[tuple[str, object]]:
    """Yield the rows of a file. head: its first bytes. name: the file's name in positions."""
    if head.startswith(PARQUET_START):
        yield from _iterate_parquet_rows(path, file, name)
    elif head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        content = file.read()
        try:
            entries = json.loads(content)
        except (ValueError, RecursionError):
            entries = [content]  # parsing this row raises an error that says what is wrong
        yield from ((f"{name} entry {number}", entry) for number, entry in enumerate(entries, 1))
    else:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{name}:{number}", line.removeprefix(BYTE_ORDER_MARK)


def _iterate_parquet_rows(path: Path, file: IO[bytes], name: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a parquet file, read by pyarrow in batches; only the columns that training reads.

    Raises: InputError if pyarrow is not installed, or if the file is damaged or has no column of conversations.
    """
    check_parquet(path)
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        if not file.seekable():
            file = BytesIO(file.read())
        table = ParquetFile(file)
        number = 0
        for batch in table.iter_batches(
            PARQUET_BATCH_ROWS, columns=_choose_columns(path, table.schema_arrow.names)
        ):
            for row in batch.to_pylist():
                number += 1
                yield f"{name} row {number}", drop_nulls(row)
    except pyarrow.ArrowException as error:
        raise InputError(
            f"{path} is a damaged parquet file: {get_first_line(error)}; fetch it again"
        ) from error


def _iterate_hub_rows(name: str) -> Iterator[tuple[str, object]]:
    """Yield the rows of a data set of the hub, through the library `datasets` and its cache.

    Raises: InputError if the library is not installed, or if there is no such data set or split.
    """
    check_hub_package(name)
    library: Any = importlib.import_module("datasets")
    repository, configuration, split = split_hub_name(name)
    try:
        data: Any = library.load_dataset(repository, configuration, split=split or "train")
    except Exception as error:  # the library passes on errors of the hub and of the files
        raise InputError(
            f"no file {name}, and no data set of the hub: {get_first_line(error)} (owner/name:SPLIT "
            "names another split)"
        ) from error
    for number, row in enumerate(data.select_columns(_choose_columns(name, data.column_names)), 1):
        yield f"{name} row {number}", drop_nulls(row)


def is_saved(folder: Path) -> bool:
    """Whether a folder is a data set that `save_to_disk` of the library `datasets` wrote."""
    return all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def _read_saved(folder: Path) -> Iterator[tuple[str, object]]:
    """Yield the rows of a data set that `save_to_disk` wrote. Raises InputError if it is damaged."""
    check_extra("data", f"{folder} is a data set that save_to_disk wrote, which", "datasets")
    library: Any = importlib.import_module("datasets")
    try:
        data: Any = library.load_from_disk(str(folder))
    except Exception as error:  # the library passes on errors of the files
        raise InputError(f"cannot read {folder}: {get_first_line(error)}; save it again") from error
    for number, row in enumerate(
        data.select_columns(_choose_columns(folder, data.column_names)), 1
    ):
        yield f"{folder.name} row {number}", drop_nulls(row)


def _choose_columns(source: object, columns: Sequence[str]) -> list[str]:
    """Choose the columns that training reads. Raises InputError if none holds conversations."""
    if not set(columns) & set(ROW_FIELDS):
        raise InputError(
            f"{source} has no column of conversations, only {', '.join(sorted(columns))}; "
            f"name it one of {', '.join(ROW_FIELDS)}"
        )
    return [name for name in columns if name in ROW_FIELDS or name in WITH_ROWS]


def drop_nulls(value: object) -> object:
    """Drop null fields from a row: in a table each row has the fields of all rows."""
    if isinstance(value, dict):
        return {name: drop_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [drop_nulls(part) for part in value]
    return value


def check_source_packages(source: str | Path) -> None:
    """Raises InputError if a source needs a package that is not installed. Reads the first bytes of its files."""
    name = get_hub_name(source)
    if name:
        check_hub_package(name)
        return
    for path in list_data_files(source).values():
        with _open_unpacked(path) as file:
            if file.read(len(PARQUET_START)) == PARQUET_START:
                check_parquet(path)


def check_hub_package(name: str) -> None:
    """Raises InputError if the package that reads data sets of the hub is not installed."""
    check_extra("data", f"there is no file or folder {name}; a data set of the hub", "datasets")


def check_parquet(path: Path) -> None:
    """Raises InputError if the package that reads parquet is not installed."""
    check_extra("data", f"{path} is a parquet file, which", "pyarrow")


def split_hub_name(name: str) -> tuple[str, str | None, str | None]:
    """Split a hub name into (repository, configuration, split), with None for a part that is absent."""
    match = HUB_NAME_PATTERN.fullmatch(name)
    if match is None:
        raise InputError(f"{name} is no data set of the hub: write owner/name:configuration:split")
    repository, configuration, split = match.groups()
    if split is None:  # a single name after the repository is the split
        return repository, None, configuration
    return repository, configuration, split


def hash_source(source: str | Path) -> str:
    """Identify the content of a source: SHA-256 of a file or of a folder's files; the commit of a hub data set.

    Raises: InputError if the source cannot be read.
    """
    name = get_hub_name(source)
    if name:
        repository, _, configuration_and_split = name.partition(":")
        return f"commit {commit_of(repository)} {configuration_and_split}".strip()
    try:
        digests = {name: hash_data_file(path) for name, path in list_data_files(source).items()}
    except OSError as error:
        raise InputError(
            f"cannot read {source}: {get_first_line(error)}; give a JSONL file"
        ) from error
    if len(digests) == 1:
        return digests.popitem()[1]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def commit_of(repository: str) -> str:
    """The newest commit of a hub data set; the cached commit if the hub cannot be reached. Raises InputError."""
    from huggingface_hub import hf_hub_download

    try:  # a file that every repository has
        file = hf_hub_download(repository, ".gitattributes", repo_type="dataset")
    except Exception as error:  # its class depends on the HTTP client of the hub's library
        raise InputError(
            f"no file or folder {repository}, and the hub cannot load it:  {get_first_line(error)}"
        ) from error
    return Path(file).parent.name


def count_source_bytes(source: str | Path) -> int | None:
    """Total bytes of a file or of a folder's data files; None for a data set of the hub."""
    if get_hub_name(source):
        return None
    return sum(file.stat().st_size for file in list_data_files(source).values())


def get_hub_name(source: str | Path) -> str | None:
    """The source as the name of a hub data set; None if it is a path."""
    name = str(source)
    path = Path(source).expanduser()
    if not set(path.suffixes).isdisjoint(DATA_SUFFIXES) or path.exists():
        return None
    if not HUB_NAME_PATTERN.fullmatch(name):
        return None
    return name


def list_data_files(source: str | Path) -> dict[str, Path]:
    """List the data files of a file or a folder with its subfolders, sorted, by their names in positions.

    Hidden files are skipped.

    Raises: InputError for a folder without data files, and for one that holds several data sets of `save_to_disk`.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return {path.name: path}
    if is_saved(path):
        return {file.name: file for file in sorted(path.glob("*.arrow"))}
    files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*"))}
    for file in files.values():
        if is_saved(file):
            raise InputError(
                f"{path} holds data sets that save_to_disk wrote: name the folder of one, as in {file}"
            )
    data_files = {}
    for name, file in files.items():
        is_hidden = re.search(r"(^|/)\.", name) is not None
        if name.endswith(FILE_ENDINGS) and not is_hidden:
            data_files[name] = file
    if not data_files:
        raise InputError(f"{path} holds no file named *{', *'.join(DATA_SUFFIXES)}")
    return data_files


def hash_data_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
