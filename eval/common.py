"""Helpers that several evaluations share: progress, options that are lists, differences from an earlier run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treespec.errors import InputError


@dataclass(frozen=True)
class ProgressStep:
    """Progress of an evaluation.

    Attributes:
        done: number of finished answers (or other units of work).
        total: number of all of them.
        text: the current step in words.
    """

    done: int
    total: int
    text: str


Report = Callable[[ProgressStep], None]


def ignore_report(step: ProgressStep) -> None:
    """Ignore progress: the default `report` of every evaluation."""


def split_list(name: str, values: str | None) -> list[str]:
    """Split an option's value at commas or semicolons into its distinct parts; None gives [].

    A comma before `option=` does not separate: `optimal:extra=0,exact=1` is one part.

    Raises:
        InputError: a part is empty.
    """
    if values is None:
        return []
    parts = [part.strip() for part in re.split(r"[;,](?!\s*[\w-]+=)", values)]
    if not all(parts):
        raise InputError(f"--{name} {values!r} has an empty part: separate by single commas")
    return list(dict.fromkeys(parts))


def describe_differences(earlier: Mapping[str, object], current: Mapping[str, object]) -> str:
    """Describe the values that differ from an earlier run's; "" if none differs.

    A name that begins with `the` belongs to a digest, whose values are not printed.
    """
    changes = []
    for name, value in current.items():
        if earlier.get(name, value) == value:
            continue
        if name.startswith("the "):
            changes.append(f"{name} changed")
        else:
            changes.append(f"{name} was {earlier[name]}, now {value}")
    return "; ".join(changes)
