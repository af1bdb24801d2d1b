"""Tree files: a JSON list of paths, as people write them, or paths with a checksum."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from treespec.trees.static import StaticTree, TreeError

LARGEST = 4096  # nodes, and draws at a node


def from_file(path: str | Path) -> StaticTree:
    """The tree in a file that holds a list such as [[0], [1], [0, 0]], or `text_of` a tree.

    Raises TreeError, which names the file and the wrong path.
    """
    # 1. Read the JSON.
    try:
        content: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TreeError(f"cannot read tree file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TreeError(f"tree file {path} is not JSON: {error}") from error

    # 2. Take the paths, and compare their checksum where the file has one.
    paths = content.get("paths") if isinstance(content, dict) else content
    if not isinstance(paths, list):
        raise TreeError(f"tree file {path} must hold a list of paths such as [[0], [1], [0, 0]]")
    if isinstance(content, dict) and content.get("checksum", digest(paths)) != digest(paths):
        raise TreeError(
            f"tree file {path} is not as it was written, its checksum does not match: make it "
            "again with treespec tree, or, if you have edited it, delete its field 'checksum'"
        )

    # 3. Check each path and build the tree.
    try:
        return StaticTree(tuple(checked(paths)))
    except TreeError as error:
        raise TreeError(f"tree file {path}: {error}") from error


def text_of(tree: StaticTree) -> str:
    """The content of a tree's file: its paths and their checksum."""
    paths = [list(path) for path in tree.paths[1:]]
    return json.dumps({"paths": paths, "checksum": digest(paths)}) + "\n"


def digest(paths: Sequence[object]) -> str:
    """The checksum of the paths, SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(paths).encode()).hexdigest()


def checked(paths: Sequence[object]) -> Iterable[tuple[int, ...]]:
    """The paths of a file as tuples. Raises TreeError, which counts to the first bad entry."""
    if len(paths) >= LARGEST:
        raise TreeError(f"{len(paths)} paths are over {LARGEST} nodes with the root: take fewer")
    seen: set[tuple[int, ...]] = set()
    for number, path in enumerate(paths, 1):
        shown = json.dumps(path)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
        if not isinstance(path, list) or not path:
            raise TreeError(
                f"entry {number}, {shown}, is no path: write a list of numbers such as [0, 0]"
            )
        if not all(type(ordinal) is int and 0 <= ordinal < LARGEST for ordinal in path):
            raise TreeError(
                f"entry {number}, {shown}, must hold whole numbers from 0 to {LARGEST - 1}"
            )
        if tuple(path) in seen:
            raise TreeError(f"entry {number}, {shown}, stands there twice: delete one")
        seen.add(tuple(path))
    return seen
