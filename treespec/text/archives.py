"""Archives given in place of text: recognised by their first bytes, with a remedy."""

from pathlib import Path

from treespec.errors import InputError

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
