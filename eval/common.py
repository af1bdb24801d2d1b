"""What several evaluations share: progress, lists of options, what differs from a run before."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treespec.errors import InputError


@dataclass(frozen=True)
class Step:
    """Progress of an evaluation. done, total: answers. text: the present or latest step."""

    done: int
    total: int
    text: str


Report = Callable[[Step], None]


def silent(step: Step) -> None:
    """A report that nobody reads."""


def listed(name: str, values: str | None) -> list[str]:
    """The different parts of an option's value, between commas or semicolons; none of None.

    A comma before `option=` does not separate: `optimal:extra=0,exact=1` is one part. Raises
    InputError for an empty part.
    """
    if values is None:
        return []
    parts = [part.strip() for part in re.split(r"[;,](?!\s*[\w-]+=)", values)]
    if not all(parts):
        raise InputError(f"--{name} {values!r} has an empty part: separate by single commas")
    return list(dict.fromkeys(parts))


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """What differs from an earlier run, in words; "" for nothing. Digests bear names with `the`."""
    return "; ".join(
        f"{name} changed" if name.startswith("the ") else f"{name} was {before[name]}, now {x}"
        for name, x in now.items()
        if before.get(name, x) != x
    )
