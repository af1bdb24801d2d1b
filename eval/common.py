"""What several evaluations share: progress, order and seeds of answers, lists of options."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from treespec.errors import InputError

Stage = Literal["head", "rest_of_drafting", "target", "verify", "commit", "rest"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # of a cycle, in the order of tables
STAGE_NAMES = {stage: stage.replace("_", " ") for stage in STAGES} | {"head": "draft model"}

Item = TypeVar("Item")


@dataclass(frozen=True)
class Step:
    """Progress of an evaluation. done, total: answers. text: the present or latest step."""

    done: int
    total: int
    text: str


def in_order(configurations: Sequence[Item], number: int) -> list[Item]:
    """The order of the configurations for question `number`: one row of a Williams square.

    Over n questions for n configurations (2 n where n is odd), each configuration runs equally
    often in every place and directly after every other (Williams 1949). For n = 4:

        question 0   0 1 3 2
        question 1   1 2 0 3
        question 2   2 3 1 0
        question 3   3 0 2 1
    """
    # 1. Zigzag away from `number`: number, number + 1, number - 1, number + 2, …
    n = len(configurations)
    row = [(number + (j + 1) // 2 * (1 if j % 2 else -1)) % n for j in range(n)]

    # 2. For an odd n, the second n questions take the rows in reverse.
    reverse = n % 2 == 1 and number // n % 2 == 1
    return [configurations[i] for i in (reversed(row) if reverse else row)]


def seed_of(seed: int, question_id: int | str, turn: int, model_id: str) -> int:
    """The seed of one answer: the same on every machine and after every resumption."""
    return zlib.crc32(json.dumps([seed, question_id, turn, model_id]).encode())


def listed(name: str, values: str) -> list[str]:
    """The different parts of an option's value, between commas or semicolons.

    A comma before `option=` does not separate: `is-lp:s=8,draft-temperatures=1` is one part. Raises
    InputError for an empty part.
    """
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


def drafted_by(config: Mapping[str, object]) -> str:
    """What drafts, for a note below tables. config: an evaluation's options, as JSON keeps them."""
    drafter = config.get("drafter")
    return f"drafter {drafter}" if drafter else f"head {config['head']}"
