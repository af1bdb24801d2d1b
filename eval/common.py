"""Helpers of several evaluations: progress, options that are lists, differences from an earlier run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treespec.errors import InputError


@dataclass(frozen=True)
class ProgressStep:
    """Progress of an evaluation. done, total: answers. text: the present or latest step."""

    done: int
    total: int
    text: str


Report = Callable[[ProgressStep], None]


def ignore_report(step: ProgressStep) -> None:
    """Ignore progress: the default where a caller does not want to hear of it."""


def split_list(name: str, values: str | None) -> list[str]:
    """Split an option's value at commas or semicolons into its distinct parts. None has no parts.

    A comma before `option=` does not separate: `optimal:extra=0,exact=1` is one part. Raises
    InputError for an empty part.
    """
    if values is None:
        return []
    parts = [part.strip() for part in re.split(r"[;,](?!\s*[\w-]+=)", values)]
    if not all(parts):
        raise InputError(f"--{name} {values!r} has an empty part: separate by single commas")
    return list(dict.fromkeys(parts))


def describe_differences(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe what differs from an earlier run; "" for nothing. A name that begins with `the` is a digest's."""
    changes = []
    for name, value in now.items():
        if before.get(name, value) == value:
            continue
        if name.startswith("the "):
            changes.append(f"{name} changed")
        else:
            changes.append(f"{name} was {before[name]}, now {value}")
    return "; ".join(changes)
