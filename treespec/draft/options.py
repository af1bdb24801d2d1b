"""What a row of the table of drafters holds, and the options of drafters. It loads no torch."""

import re
from dataclasses import dataclass, fields
from typing import Any

from treespec.errors import InputError
from treespec.options import MANY, TOKENS, Options, option

ORDER = 16  # tokens that a datastore's suffixes are sorted by: the longest pattern of a search
SINKS, WINDOW = 4, 32
HEAD = "treespec.draft.trained.load:load_trained"


@dataclass(frozen=True)
class DrafterKind:
    """A row of the table. A name such as `module:function` is imported when it is needed.

    forms: how it is written; `--help` shows the first. loads: (DrafterSpec, target) -> a proposer
    or a drafter. summary, source: what it drafts from, and the paper.
    checks: (DrafterSpec, the target's directory) raises InputError for missing or damaged files
    before torch loads. place: whether a directory, file or hub id comes first: "" no, "must", "may".
    options: a frozen dataclass. first: the option that may be given without its name.
    one_hot: whether its tokens are found, not drawn: they have no draft distribution.
    at_once: whether a head drafts all levels from the sequence alone. trained: whether `treespec train` makes it.
    several: whether + joins several directories.
    """

    name: str
    forms: tuple[str, ...]
    loads: str
    summary: str
    source: str = ""
    checks: str = ""
    place: str = ""
    options: type[Any] | None = None
    first: str = ""
    one_hot: bool = False
    at_once: bool = False
    trained: bool = False
    several: bool = False

    @property
    def is_head(self) -> bool:
        return self.loads == HEAD

    @property
    def switches(self) -> set[str]:
        """The options that are given by their name alone."""
        known = fields(self.options) if self.options else ()
        return {field.name for field in known if field.type is bool}


@dataclass(frozen=True)
class DrafterOptions(Options):
    """As in `lookup:tokens=10,ngram=3`: whole numbers and switches."""


@dataclass(frozen=True)
class LookupOptions(DrafterOptions):
    tokens: int = option("of a continuation", 10, least=1, most=4095)
    ngram: int = option(
        "last tokens to match, at most; the longest match counts", 3, least=1, most=64
    )
    matches: int = option("continuations that are merged into a tree", 1, least=1, most=4096)


@dataclass(frozen=True)
class RestOptions(DrafterOptions):
    """Raises InputError also where `longest` is below `shortest`."""

    nodes: int = option("of the tree, the root too", 64, least=2, most=4096)
    tokens: int = option("of a continuation", 10, least=1, most=4095)
    matches: int = option("continuations at most", 5000, least=1, most=TOKENS)
    longest: int = option("tokens of the suffix to search for", ORDER, least=1, most=ORDER)
    shortest: int = option("and the least of them", 2, least=1, most=ORDER)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise InputError(
                f"longest is {self.longest}, must be at least shortest, {self.shortest}"
            )


@dataclass(frozen=True)
class LookaheadOptions(DrafterOptions):
    window: int = option("tokens of a row", 15, least=1, most=1024)
    ngram: int = option("tokens of an n-gram", 5, least=2, most=64)
    guesses: int = option("n-grams that are kept of each first token", 15, least=1, most=1024)


@dataclass(frozen=True)
class JacobiOptions(DrafterOptions):
    window: int = option("guesses", 15, least=1, most=4095)


@dataclass(frozen=True)
class SuffixOptions(DrafterOptions):
    tokens: int = option(
        "of earlier completions to draft from; 0: from the sequence at hand alone",
        200_000,
        least=0,
        most=TOKENS * 10,
    )
    longest: int = option("tokens of the suffix to look for", 64, least=1, most=1024)
    count: int = option("places that the suffix must have", 1, least=1, most=64)
    nodes: int = option("draft tokens at most", 48, least=1, most=4095)
    growth: int = option("draft tokens for each token of the match", 2, least=1, most=64)
    percent: int = option("least probability of a drafted path", 10, least=1, most=100)


@dataclass(frozen=True)
class SparseOptions(DrafterOptions):
    """Raises InputError also for a budget that leaves no room beside the tokens that are kept."""

    budget: int = option("tokens whose keys and values drafts see", 512, least=1, most=MANY)
    snapkv: bool = option("the prompt's last tokens choose them", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 * WINDOW if self.snapkv else 2 * SINKS
        if self.budget < least:
            raise InputError(f"the budget must be at least {least} tokens")


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


def options_of(kind: DrafterKind, text: str, written: str) -> Any:
    """A row's options in `tokens=10,ngram=3`. Raises InputError."""
    assert kind.options
    defaults = {field.name: field.default for field in fields(kind.options)}
    values: dict[str, int] = {}
    for number, part in enumerate(text.split(",") if text else ()):
        match = re.fullmatch(r"(?:(\w+)=)?(\w+)", part)
        name = match[1] or (kind.first if number == 0 else part) if match else ""
        if match and part in kind.switches:
            values[part] = True
        elif match and name in defaults.keys() - kind.switches and re.fullmatch("[0-9]+", match[2]):
            values[name] = int(match[2])
        else:
            choice = ", ".join(f"{name}={value}" for name, value in defaults.items())
            raise InputError(
                f"--drafter {written}: {part!r} is not understood; its options are {choice}"
            )
    try:
        return kind.options(**values)
    except InputError as error:
        raise InputError(f"--drafter {written}: {error}") from None
