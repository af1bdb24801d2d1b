"""Rows of parquet files, read by pyarrow a few at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from treespec.errors import InputError, first_line
from treespec.text.forms import FORMS, WITH_ROWS

MAGIC = b"PAR1"  # the first bytes of a file
ROWS = 256  # read at once


def rows(path: Path, file: IO[bytes], name: str) -> Iterator[tuple[str, object]]:
    """(place, row) of a file. Only columns that training reads are loaded.

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
