"""JSONL: from bytes to objects and back."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a published file, one a line."""
    return (json.loads(line) for line in content.split(b"\n") if line.strip())


def written(lines: Iterable[Mapping[str, object]]) -> bytes:
    """One line for each object."""
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
