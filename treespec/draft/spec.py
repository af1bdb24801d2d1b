"""The value that `--drafter` names. It loads no torch. `DrafterSpec.parse` alone reads what a user writes:

suffix:DIR,nodes=8 + eagle:HEAD @dynamic:nodes=60
└ suffix cache      └ drafter   └ tree
"""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from treespec.demo.known import head_of
from treespec.draft.registry import DRAFTERS, FORMS, DrafterKind
from treespec.errors import InputError
from treespec.options import nearest

NAMES = "|".join(map(re.escape, DRAFTERS))
JOINED = re.compile(rf"(suffix(?::.*?)?)\+((?:{NAMES})(?:[:@].*)?)")  # the first + before a name


@dataclass(frozen=True)
class DrafterSpec:
    """What `--drafter` names.

    own: as the user wrote it, without tree and cache. place: a directory, file or hub id; "" for
    none. options: of `kind.options`. tree: as `--tree` takes it; None: the default. cache: the suffix
    cache that drafts next to it.
    """

    kind: DrafterKind
    own: str
    place: str = ""
    options: Any = None
    tree: str | None = None
    cache: "DrafterSpec | None" = None

    @classmethod
    def parse(cls, text: str) -> "DrafterSpec":
        """Raises InputError for an unknown drafter, a bad option and members that cannot be joined."""
        joined = JOINED.fullmatch(text)
        if not joined:
            return cls._member(text)
        cache, spec = map(cls._member, joined.groups())
        if spec.kind.one_hot:
            raise InputError(
                f"--drafter {text}: {spec.kind.name} has no draft model to join: take suffix alone, "
                "or suffix+eagle:DIRECTORY"
            )
        return replace(spec, cache=cache)

    @classmethod
    def parse_all(cls, text: str) -> list["DrafterSpec"]:
        """A list, such as `suffix:nodes=24+eagle:HEAD@chain:3,mtp`, without repeats.

        Commas before `option=` do not separate.
        """
        pieces = re.split(r"[;,](?!\s*[\w-]+=)", text)
        parts = [re.sub(r",\s+", ",", piece.strip()) for piece in pieces]
        if not all(parts):
            raise InputError(f"--drafter {text!r} has an empty part: separate by single commas")
        return list(map(cls.parse, dict.fromkeys(parts)))

    @classmethod
    def _member(cls, text: str) -> "DrafterSpec":
        # 1. The name, the value and the tree.
        name = re.split("[:@]", text)[0]
        kind = DRAFTERS.get(name)
        if kind is None:
            hint = nearest(name.removeprefix("suffix+"), DRAFTERS)
            raise InputError(f"unknown drafter {text!r}{hint}: choose {FORMS}")
        own, _, tree = text.partition("@")
        path = text.removeprefix(f"{name}:")
        if path != text and (kind.one_hot or Path(path).exists()):
            own = text
            tree = ""
        value = own[len(name) + 1 :]
        if name == "suffix" and (joined := re.search(r"\+([\w+-]*):", value)):
            hint = nearest(joined[1], DRAFTERS)
            raise InputError(f"--drafter {text}: unknown drafter {joined[1]!r}{hint}")

        # 2. The directory or file, and the options.
        place, rest = parts_of(kind, value)
        if kind.place == "must" and not place:
            raise InputError(f"--drafter {name} names no directory: write {name}:PATH")
        if rest and not kind.options:
            raise InputError(f"--drafter {own}: {name} takes no value")
        options = kind.options and options_of(kind.options, rest, own)
        return cls(kind, own, (kind.is_head and head_of(place)) or place, options, tree or None)

    @property
    def written(self) -> str:
        """As the user wrote it, without the tree."""
        return "+".join(member.own for member in self.members)

    @property
    def members(self) -> tuple["DrafterSpec", ...]:
        return (self.cache, replace(self, cache=None)) if self.cache else (self,)

    @property
    def cache_folder(self) -> str:
        """The folder of its suffix cache; "" without one."""
        first = self.members[0]
        return first.place if first.kind.name == "suffix" else ""

    def tree_or(self, tree: Any) -> Any:
        """The tree that it names, or else `tree`. Raises InputError where both are given."""
        if tree is not None and self.tree is not None:
            raise InputError(f"both --tree {tree} and @{self.tree} are given: leave out one")
        return self.tree if tree is None else tree

    @property
    def short(self) -> str:
        """Its names, and the last part of each path, for tables: suffix+eagle:HEAD."""
        parts = (member.own.partition(":") for member in self.members)
        return "+".join(kind + colon + Path(value).name for kind, colon, value in parts)

    def check(self, target: str) -> None:
        """Raises InputError for files that are missing, damaged or of another target.

        target: its directory or hub id.
        """
        for member in self.members:
            if member.kind.checks:
                resolve_name(member.kind.checks)(member, target)


def parts_of(kind: DrafterKind, value: str) -> tuple[str, str]:
    """(directory or file, options) of a value such as `DIRECTORY,nodes=24`.

    Where the directory may be left out, a value that begins like an option is none: `nodes=x` is a
    mistake, `./nodes=x` a folder.
    """
    if not kind.options:
        return (value, "") if kind.place else ("", value)
    if not kind.place or (kind.place == "may" and re.match(r"\w+=[^/\\]*(,|$)", value)):
        return "", value
    place, *given = re.split(r",(?=\w+=)", value)
    return place, ",".join(given)


def options_of(group: type[Any], text: str, own: str) -> Any:
    """A row's options in `tokens=10,ngram=3`; the first one may go without its name. Raises InputError."""
    defaults = {field.name: field.default for field in fields(group)}
    values: dict[str, int] = {}
    for number, part in enumerate(text.split(",") if text else ()):
        name, _, value = part.rpartition("=")
        name = name or (next(iter(defaults)) if number == 0 else "")
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
