"""Trees of a fixed shape: chains, balanced trees, EAGLE-1's and Medusa's trees, and tree files.

A tree file is a JSON list of paths, or an object with `paths` and their `checksum`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from textwrap import shorten
from typing import TypeGuard

from treespec.trees.ranges import DEPTH_RANGE, NODES_RANGE
from treespec.trees.shape import Builder, Growth, Policy
from treespec.trees.shape import TreeError as TreeError

MAX_FILE_NODES = 4096  # nodes of a tree file, and draws at a node

# EAGLE-1's default tree: levels of 4, 8, 8, 3, 2 nodes (Li et al. 2024, figure 7, and the released
# configuration). A path is written by the ordinals of its draws: 02 is the third draw below the first.
EAGLE_PATHS = """
0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001
"""

# Medusa's 63 nodes for Vicuna-7B (Cai et al. 2024, the released configuration).
# `treespec.trees.most_likely` is the method by which they were chosen.
MEDUSA_PATHS = """
0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60
70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101
200 0000 0001
"""


MAX_ERROR_LEVELS = 99  # levels that are built before an error, and characters that it quotes


@dataclass(frozen=True)
class StaticTree(Policy):
    """A tree given by its paths: (0, 2) is the third draw below the first draw at the root.

    A gap in the ordinals, such as (0,) and (2,) without (1,), is a draw that is verified but has no node.

    Attributes:
        paths: of all nodes, sorted level by level; the root's () comes first and may be left out by callers.

    Raises:
        TreeError: the tree has no paths, lacks a path's parent, or is too large or too deep.
    """

    name = "static"
    repeats = True

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes: set[tuple[int, ...]] = {()}
        nodes.update(map(tuple, self.paths))
        paths = sorted(nodes, key=lambda path: (len(path), path))
        for path in paths[1:]:
            if path[:-1] not in nodes:
                raise TreeError(
                    f"tree path {list(path)} has no parent {list(path[:-1])}: add it to the list"
                )
        if len(paths) not in NODES_RANGE or len(paths[-1]) not in DEPTH_RANGE:
            raise TreeError(
                f"the tree has {len(paths)} nodes and is {len(paths[-1])} deep, must have "
                f"{NODES_RANGE.bounds} nodes (the root counts) and be {DEPTH_RANGE.bounds} deep"
            )
        object.__setattr__(self, "paths", tuple(paths))

    def __str__(self) -> str:
        return f"static tree of {self.size - 1} nodes, {self.max_depth} deep"

    def grow(self, build: Builder) -> Growth:
        return build.grow_fixed(self)

    @property
    def max_depth(self) -> int:
        return len(self.paths[-1])

    @property
    def size(self) -> int:
        """The number of nodes N, root included."""
        return len(self.paths)

    @property
    def max_draws(self) -> int:
        """The largest number of draws K at a node."""
        return max(path[-1] + 1 for path in self.paths[1:])

    def count_draws(self, path: tuple[int, ...]) -> int:
        """Returns the number of draws at the node of a path."""
        return max(child[-1] + 1 for child in self.paths[1:] if child[:-1] == path)

    def limit_draws(self, draws: int) -> "StaticTree":
        """Returns the tree with only the first `draws` draws at every node."""
        return StaticTree(tuple(path for path in self.paths[1:] if max(path) < draws))

    def cut(self, depth: int) -> "StaticTree":
        """Returns the tree without the levels deeper than `depth`."""
        return StaticTree(tuple(path for path in self.paths[1:] if len(path) <= depth))


def build_chain(depth: int) -> StaticTree:
    """Builds a chain: one draw at each of `depth` nodes. Raises TreeError."""
    if depth not in DEPTH_RANGE:
        raise TreeError(f"chain:{depth}: the length must be {DEPTH_RANGE.bounds}")
    return build_balanced_tree(1, depth)


def build_balanced_tree(children: int, depth: int) -> StaticTree:
    """Builds the tree in which every node above `depth` has `children` children."""
    return build_level_tree(*[children] * min(depth, MAX_ERROR_LEVELS))


def build_level_tree(*children: int) -> StaticTree:
    """Builds a tree from the number of children of each node of a level. 2x1x2 has eight below the root:

        root ─┬─ 0 ── 00 ─┬─ 000
              │           └─ 001
              └─ 1 ── 10 ─┬─ 100
                          └─ 101

    4x1x1: independent paths (SpecInfer). 1x3x1: delayed expansion (2602.16994). Raises TreeError.
    """
    sizes = "x".join(map(str, children))[:MAX_ERROR_LEVELS]
    fits = all(count in NODES_RANGE or count == 1 for count in children)
    if not fits or len(children) not in DEPTH_RANGE:
        raise TreeError(
            f"a tree of {sizes}: children must be from 1 to {NODES_RANGE.most}, depth {DEPTH_RANGE.bounds}"
        )
    if 1 + sum(accumulate(children, mul)) not in NODES_RANGE:
        raise TreeError(
            f"a tree of {sizes} has over {NODES_RANGE.most:,} nodes: take fewer children or less depth"
        )
    paths: list[tuple[int, ...]] = []
    for depth in range(1, len(children) + 1):
        paths += product(*map(range, children[:depth]))
    return StaticTree(tuple(paths))


def build_eagle_tree() -> StaticTree:
    """Builds EAGLE-1's tree: 25 nodes and the root."""
    return parse_digits(EAGLE_PATHS)


def build_medusa_tree() -> StaticTree:
    """Builds Medusa's tree: 63 nodes and the root."""
    return parse_digits(MEDUSA_PATHS)


def parse_digits(paths: str) -> StaticTree:
    """Builds the tree of paths such as `01 020`, in which every digit is an ordinal."""
    return StaticTree(tuple(tuple(map(int, digits)) for digits in paths.split()))


def read_tree_file(path: str | Path) -> StaticTree:
    """Reads a tree file: a list such as [[0], [1], [0, 0]], or the object that `format_tree` writes.

    Raises TreeError, which names the file and the wrong path.
    """
    # 1. Read the JSON.
    try:
        content: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TreeError(f"cannot read tree file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TreeError(f"tree file {path} is not JSON: {error}") from error

    # 2. Take the paths, and compare their checksum if the file has one.
    paths: object = content
    if isinstance(content, dict):
        paths = content.get("paths")
    if not isinstance(paths, list):
        raise TreeError(f"tree file {path} must hold a list of paths such as [[0], [1], [0, 0]]")
    if isinstance(content, dict) and content.get("checksum", hash_paths(paths)) != hash_paths(
        paths
    ):
        raise TreeError(
            f"tree file {path} is not as it was written, its checksum does not match: make it "
            "again with treespec tree, or, if you have edited it, delete its field 'checksum'"
        )

    # 3. Check each path and build the tree.
    try:
        return StaticTree(tuple(validate_paths(paths)))
    except TreeError as error:
        raise TreeError(f"tree file {path}: {error}") from error


def format_tree(tree: StaticTree) -> str:
    """Returns the content of a tree file: the paths and their checksum."""
    paths = [list(path) for path in tree.paths[1:]]
    return json.dumps({"paths": paths, "checksum": hash_paths(paths)}) + "\n"


def hash_paths(paths: Sequence[object]) -> str:
    """Returns the checksum of the paths, SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(paths).encode()).hexdigest()


def validate_paths(paths: Sequence[object]) -> Iterable[tuple[int, ...]]:
    """Returns the paths of a file as tuples. Raises TreeError with the number of the first bad entry."""
    if len(paths) >= MAX_FILE_NODES:
        raise TreeError(
            f"{len(paths)} paths are over {MAX_FILE_NODES} nodes with the root: take fewer"
        )
    seen: set[tuple[int, ...]] = set()
    for number, path in enumerate(paths, 1):
        if not is_path(path):
            problem = f"is no path: write a list of whole numbers from 0 to {MAX_FILE_NODES - 1}, as [0, 0]"
        elif tuple(path) in seen:
            problem = "stands there twice: delete one"
        else:
            seen.add(tuple(path))
            continue
        raise TreeError(f"entry {number}, {shorten(json.dumps(path), 40)}, {problem}")
    return seen


def is_path(value: object) -> TypeGuard[list[int]]:
    """Whether an entry of a tree file is a list of ordinals."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(ordinal) is int and 0 <= ordinal < MAX_FILE_NODES for ordinal in value)
