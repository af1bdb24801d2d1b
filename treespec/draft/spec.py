"""The value that `--drafter` names. It loads no torch. `DrafterSpec.parse` alone reads what a user writes:

suffix:DIR,nodes=8 + eagle:HEAD @dynamic:nodes=60
└ suffix cache      └ drafter   └ tree
"""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from treespec.draft.registry import (
    DRAFTER_FORMS,
    DRAFTERS,
    DrafterKind,
    find_drafter,
    find_head_place,
)
from treespec.errors import InputError
from treespec.options import find_nearest_name
from treespec.trees.extensions import describe_own, find_path


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter as `--drafter` names it.

    Attributes:
        kind: the row of the registry.
        own: the user's text without tree and cache.
        place: a directory, file or hub id; "" if the value names none.
        options: an instance of `kind.options`; None if the kind has no options.
        tree: the value behind `@`, as `--tree` takes it. Default: None, the default tree.
        cache: the suffix cache that drafts next to this drafter. Default: None.
    """

    kind: DrafterKind
    own: str
    place: str = ""
    options: Any = None
    tree: str | None = None
    cache: "DrafterSpec | None" = None

    @classmethod
    def parse(cls, text: str) -> "DrafterSpec":
        """Parse one drafter, such as `suffix:nodes=24+eagle:HEAD@chain:3`.

        Raises: InputError for an unknown drafter, a bad option, and drafters that cannot be joined.
        """
        members = split_joined(text)
        if not members:
            return cls._parse_member(text)
        cache, spec = map(cls._parse_member, members)
        if spec.kind.one_hot:
            raise InputError(
                f"--drafter {text}: {spec.kind.name} has no draft model to join: take suffix alone, "
                "or suffix+eagle:DIRECTORY"
            )
        return replace(spec, cache=cache)

    @classmethod
    def parse_all(cls, text: str) -> list["DrafterSpec"]:
        """Parse a list of drafters, such as `suffix:nodes=24+eagle:HEAD@chain:3,mtp`, and drop repeats.

        A comma before `option=` separates options, not drafters.
        """
        pieces = re.split(r"[;,](?!\s*[\w-]+=)", text)
        parts = [re.sub(r",\s+", ",", piece.strip()) for piece in pieces]
        if not all(parts):
            raise InputError(f"--drafter {text!r} has an empty part: separate by single commas")
        return list(map(cls.parse, dict.fromkeys(parts)))

    @classmethod
    def _parse_member(cls, text: str) -> "DrafterSpec":
        """Parse a drafter that is not joined with a suffix cache."""
        # 1. The name, the value and the tree.
        name = name_drafter(text)
        kind = find_drafter(name)
        if kind is None:
            hint = find_nearest_name(name.removeprefix("suffix+"), DRAFTERS)
            raise InputError(
                f"unknown drafter {text!r}{hint}: choose {DRAFTER_FORMS}, or {describe_own(text)}"
            )
        text = kind.name + text[len(name) :]  # a kind of head has a name of its own
        name = kind.name
        without_tree, tree = split_tree(text, kind)
        value = without_tree[len(name) + 1 :]
        if name == "suffix":
            joined = re.search(r"\+([\w+-]*):", value)
            if joined:
                hint = find_nearest_name(joined[1], DRAFTERS)
                raise InputError(f"--drafter {text}: unknown drafter {joined[1]!r}{hint}")

        # 2. The directory or file, and the options.
        place, option_text = split_value(kind, value)
        if kind.place == "must" and not all(list_places(kind, place)):
            own = without_tree.rstrip(":")
            raise InputError(f"--drafter {own} names no directory: write {name}:PATH")
        if option_text and not kind.options:
            raise InputError(f"--drafter {without_tree}: {name} takes no value")
        options = None
        if kind.options:
            options = parse_drafter_options(kind.options, option_text, without_tree)
        if kind.is_head:
            place = find_head_place(place)
        return cls(kind, without_tree, place, options, tree)

    @property
    def written(self) -> str:
        """The user's text without the tree, for messages and reports."""
        return "+".join(member.own for member in self.members)

    @property
    def members(self) -> tuple["DrafterSpec", ...]:
        """The suffix cache, if there is one, and the drafter."""
        if self.cache is None:
            return (self,)
        return (self.cache, replace(self, cache=None))

    @property
    def places(self) -> list[str]:
        """The directories, files or hub ids: one, or those that a + joins."""
        return list_places(self.kind, self.place)

    @property
    def cache_folder(self) -> str:
        """The folder of the suffix cache; "" if there is none."""
        first = self.members[0]
        if first.kind.name != "suffix":
            return ""
        return first.place

    def choose_tree(self, tree: Any) -> Any:
        """Return the tree behind `@`, else `tree`. Raises InputError if both are given."""
        if tree is not None and self.tree is not None:
            raise InputError(f"both --tree {tree} and @{self.tree} are given: leave out one")
        if tree is None:
            return self.tree
        return tree

    @property
    def short(self) -> str:
        """The drafters' names with the last part of each path, for tables: suffix+eagle:HEAD."""
        names = []
        for member in self.members:
            kind = member.kind.name
            value = member.own.removeprefix(kind)
            values = [value[1:]]
            if len(member.places) > 1:
                values = member.places
            names.append(kind + value[:1] + "+".join(Path(place).name for place in values))
        return "+".join(names)

    def check(self, target: str) -> None:
        """Check the drafter's files before torch loads.

        target: directory or hub id of the target.

        Raises: InputError for files that are missing, damaged or of another target.
        """
        for member in self.members:
            if member.kind.checks:
                resolve_name(member.kind.checks)(member, target)


def name_drafter(text: str) -> str:
    """The drafter's name at the beginning of a text: `eagle` of `eagle:HEAD@2x4`, or `module:NAME`."""
    name = re.split("[:@]", text)[0]
    if name in DRAFTERS:
        return name
    return find_path(text) or name


def split_joined(text: str) -> tuple[str, str] | None:
    """Split a text such as `suffix:DIR+eagle:HEAD` at the first + before a drafter's name; None without one."""
    if not re.match(r"suffix[:+]", text):
        return None
    for plus in re.finditer(re.escape("+"), text):
        behind = text[plus.end() :]
        name = name_drafter(behind)
        if name in DRAFTERS or find_path(name):
            return text[: plus.start()], behind
    return None


def split_tree(text: str, kind: DrafterKind) -> tuple[str, str | None]:
    """Split a drafter's text into the part before `@` and the tree behind it; None if there is no tree.

    A text that is the path of an existing file keeps its `@`, and so does that of a drafter without a draft model.
    """
    path = text.removeprefix(f"{kind.name}:")
    if path != text and (kind.one_hot or Path(path).exists()):
        return text, None
    without_tree, _, tree = text.partition("@")
    return without_tree, tree or None


def list_places(kind: DrafterKind, place: str) -> list[str]:
    """Split a place into those that a + joins. The path of an existing folder keeps its +."""
    if not kind.joins or Path(place).expanduser().exists():
        return [place]
    return place.split("+")


def split_value(kind: DrafterKind, value: str) -> tuple[str, str]:
    """Split a value such as `DIRECTORY,nodes=24` into (directory or file, options).

    If the directory may be left out, a value that begins like an option names no directory: `nodes=x` is an
    option with a wrong number, `./nodes=x` is a folder.
    """
    if not kind.options:
        if kind.place:
            return value, ""
        return "", value
    if not kind.place or (kind.place == "may" and re.match(r"\w+=[^/\\]*(,|$)", value)):
        return "", value
    place, *options = re.split(r",(?=\w+=)", value)
    return place, ",".join(options)


def parse_drafter_options(group: type[Any], text: str, own: str) -> Any:
    """Parse a kind's options, such as `tokens=10,ngram=3`; the first one needs no name. Raises InputError."""
    defaults = {field.name: field.default for field in fields(group)}
    values: dict[str, int] = {}
    parts = []
    if text:
        parts = text.split(",")
    for number, part in enumerate(parts):
        name, _, value = part.rpartition("=")
        if not name and number == 0:
            name = next(iter(defaults))
        if name not in defaults or not value.isdecimal():
            choice = ", ".join(f"{name}={value}" for name, value in defaults.items())
            raise InputError(
                f"--drafter {own}: {part!r} is not understood; its options are {choice}"
            )
        values[name] = int(value)
    try:
        return group(**values)
    except InputError as error:
        raise InputError(f"--drafter {own}: {error}") from None
