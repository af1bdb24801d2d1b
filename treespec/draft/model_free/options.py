"""The options of the drafters without a model, and of `sparse`. It loads no torch."""

from dataclasses import dataclass
from typing import Any

from treespec.errors import InputError
from treespec.options import (
    MANY,
    TOKENS,
    Options,
    check_ranges,
    option,
    parsed,
    rest_parts,
    suffix_parts,
)

ORDER = 16  # tokens that a datastore's suffixes are sorted by: the longest pattern of a search
SINKS, WINDOW = 4, 32


@dataclass(frozen=True)
class JacobiOptions:
    """window: number of guesses. Raises InputError for a number out of range."""

    window: int = option("guesses", 15, least=1, most=4095)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@dataclass(frozen=True)
class LookaheadOptions:
    """window: W, tokens of a row. ngram: N. guesses: the latest n-grams kept for each first token.

    Raises InputError for a number out of range.
    """

    window: int = option("tokens of a row", 15, least=1, most=1024)
    ngram: int = option("tokens of an n-gram", 5, least=2, most=64)
    guesses: int = option("n-grams that are kept of each first token", 15, least=1, most=1024)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@dataclass(frozen=True)
class RestOptions:
    """nodes: size of the tree with its root. tokens: length of a continuation.

    matches: the most continuations. longest, shortest: bounds of the suffix to search for. Raises
    InputError for a number out of range.
    """

    nodes: int = option("of the tree, the root too", 64, least=2, most=4096)
    tokens: int = option("of a continuation", 10, least=1, most=4095)
    matches: int = option("continuations at most", 5000, least=1, most=TOKENS)
    longest: int = option("tokens of the suffix that is searched for", ORDER, least=1, most=ORDER)
    shortest: int = option("and the least of them", 2, least=1, most=ORDER)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")
        if self.longest < self.shortest:
            raise InputError(
                f"longest is {self.longest}, must be at least shortest, {self.shortest}"
            )


@dataclass(frozen=True)
class SuffixOptions:
    """tokens: bound of each memory. longest: of the match. count: the match must have occurred so
    often. nodes: the most drafted tokens. growth: drafted tokens for each token of the match.
    percent: the least chance of a path.
    Raises InputError for a number out of range.
    """

    tokens: int = option(
        "of earlier answers to draft from; 0: from the sequence at hand alone",
        200_000,
        least=0,
        most=TOKENS * 10,
    )
    longest: int = option("tokens of the suffix that is looked for", 64, least=1, most=1024)
    count: int = option("places that the suffix must have", 1, least=1, most=64)
    nodes: int = option("drafted tokens at most", 48, least=1, most=4095)
    growth: int = option("drafted tokens for each token of the match", 2, least=1, most=64)
    percent: int = option("least chance of a drafted path", 10, least=1, most=100)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@dataclass(frozen=True)
class LookupOptions:
    """tokens: length of a continuation. ngram: the most last tokens to match; the longest match
    counts. matches: number of continuations merged into a tree.

    Raises InputError for a number out of range.
    """

    tokens: int = option("of a continuation", 10, least=1, most=4095)
    ngram: int = option("last tokens that are looked for, at most", 3, least=1, most=64)
    matches: int = option("continuations that are merged into a tree", 1, least=1, most=4096)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


OPTIONS: dict[str, type[Any]] = {
    "lookup": LookupOptions,
    "rest": RestOptions,
    "lookahead": LookaheadOptions,
    "jacobi": JacobiOptions,
    "suffix": SuffixOptions,
}


FOLDERS = {"rest": rest_parts, "suffix": suffix_parts}  # drafters whose value begins with a folder


def options_of(kind: type[Options], name: str, value: str) -> Options:
    """The options in `--drafter name:value`, written `option=number`. Raises InputError."""
    given = value
    if name in FOLDERS:
        given = FOLDERS[name](value)[1]
    return parsed(kind, given, f"--drafter {name}:{value}")


def budget_of(value: str) -> tuple[int, bool]:
    """(number of tokens, whether SnapKV chooses them) from `512` or `512,snapkv`.

    Raises InputError.
    """
    number, _, kind = value.partition(",")
    if not number.isdecimal() or kind not in ("", "snapkv"):
        raise InputError(
            f"--drafter sparse:{value} is not understood: write sparse:512 or sparse:512,snapkv"
        )
    least = 2 * WINDOW if kind else 2 * SINKS
    if int(number) < least:
        raise InputError(f"--drafter sparse:{value}: the budget must be at least {least} tokens")
    if int(number) > MANY:
        raise InputError(f"--drafter sparse:{value}: the budget must be at most {MANY:,} tokens")
    return int(number), bool(kind)
