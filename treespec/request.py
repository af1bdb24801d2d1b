"""The options of `generate` and `stream`: how an answer is drawn, and where it ends."""

import difflib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypedDict

from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.shaping.compiled import KINDS


class Options(TypedDict, total=False):
    """temperature: 0, the default, is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.

    max_new_tokens: at least 1, default 256. stop: a string, or a list of strings; any of them ends
    the answer.
    json_schema, regex, grammar: what the answer must be, at most one of them: a JSON schema as a
    dict or JSON text, a regular expression, or a grammar in llguidance's Lark. The answer ends
    where nothing may follow.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    stop: str | Sequence[str]
    json_schema: Mapping[str, object] | str | bool
    regex: str
    grammar: str


class BatchOptions(Options, total=False):
    """The options of `Spec.generate`: of each answer, and of several together."""

    batch: int | None
    seed: int | Sequence[int] | None


OPTIONS = tuple(Options.__annotations__)


def refuse_unknown(options: Mapping[str, object], *more: str) -> None:
    """Raises InputError for an unknown option. more: names known besides those of `Options`."""
    known = (*OPTIONS, *more)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {close[0]}?" if close else ":"
            raise InputError(f"unknown option {name}{hint} There are {', '.join(known)}")


@dataclass(frozen=True)
class Asked:
    """Checked options. stop: strings; any of them ends the answer.

    grammar: what the answer must be: the option's name and its value; None: anything.
    """

    params: SamplingParams
    stop: tuple[str, ...]
    max_new_tokens: int
    grammar: tuple[str, object] | None = None


def asked(options: Options) -> Asked:
    """Raises InputError for an option of the wrong type or out of range."""
    params = SamplingParams(
        temperature=_number("temperature", options.get("temperature", 0.0)),
        top_k=whole("top_k", options.get("top_k", 0)),
        top_p=_number("top_p", options.get("top_p", 1.0)),
        min_p=_number("min_p", options.get("min_p", 0.0)),
    )
    most = whole("max_new_tokens", options.get("max_new_tokens", 256), least=1)
    return Asked(params, _strings(options.get("stop", ())), most, _grammar(options))


def _grammar(options: Mapping[str, object]) -> tuple[str, object] | None:
    asked_for = [(name, options[name]) for name in KINDS if options.get(name) is not None]
    if len(asked_for) > 1:
        names = " and ".join(name for name, _ in asked_for)
        raise InputError(f"{names} are given: leave out all but one")
    return asked_for[0] if asked_for else None


def _strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence) or isinstance(stop, bytes | bytearray | memoryview):
        raise InputError(f"stop is {stop!r:.40}, must be a string or a list of strings")
    for place, string in enumerate(stop, 1):
        if not isinstance(string, str):
            raise InputError(f"stop string {place} is {string!r:.40}, must be a string")
    return tuple(stop)


def whole(name: str, value: object, least: int | None = None) -> int:
    """Raises InputError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r:.40}, must be a whole number")
    if least is not None and value < least:
        raise InputError(f"{name} is {value}, must be at least {least}")
    return int(value)


def seed_of(value: object) -> int:
    """A seed that torch's generators take; None draws one. Raises InputError."""
    if value is None:
        return secrets.randbits(63)
    seed = whole("seed", value)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, must lie in [0, 2^64)")
    return seed


def seeds_of(value: object, prompts: int) -> list[int | None]:
    """A seed for each prompt, from the first prompt's seed or a list of them. Raises InputError."""
    if value is None:
        return [None] * prompts
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != prompts:
            raise InputError(
                f"there are {len(value)} seeds for {prompts} prompts: give one seed, or one for "
                "each"
            )
        return list(value)
    first = whole("seed", value)
    return [first + i for i in range(prompts)]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {value!r:.40}, must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # out of every range
