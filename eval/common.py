"""Parts that evaluations share: lists of options, order and seeds of answers, progress."""

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from treespec.errors import InputError

STAGES = ("head", "rest_of_drafting", "target", "verify", "commit", "rest")
STAGE_NAMES = {stage: stage.replace("_", " ") for stage in STAGES} | {"head": "draft model"}


Ranked = TypeVar("Ranked")


@dataclass(frozen=True)
class Step:
    """Progress of an evaluation. done, total: answers. text: the present or latest step."""

    done: int
    total: int
    text: str


def in_order(configurations: Sequence[Ranked], number: int) -> list[Ranked]:
    """The order for one question: a row of a Williams square.

    Over n questions for n configurations (2 n where n is odd), each configuration runs equally often
    at every place and right after every other (Williams 1949).
    """
    n = len(configurations)
    row = [(number + (j + 1) // 2 * (1 if j % 2 else -1)) % n for j in range(n)]
    return [configurations[i] for i in (reversed(row) if n % 2 and number // n % 2 else row)]


def seed_of(seed: int, question_id: int | str, turn: int, model_id: str) -> int:
    """The seed of one answer, the same on every machine and after every resumption."""
    return zlib.crc32(json.dumps([seed, question_id, turn, model_id]).encode())


def parts_of(name: str, values: str) -> list[str]:
    """The parts between commas or semicolons. A comma before `option=` does not part:

    `is-lp:s=8,alphabet=50` is one part. Raises InputError for an empty part.
    """
    parts = [part.strip() for part in re.split(r"[;,](?!\s*[\w-]+=)", values)]
    if not all(parts):
        raise InputError(f"--{name} {values!r} has an empty part: separate by single commas")
    return parts


def listed(name: str, values: str) -> list[str]:
    """`parts_of`, each once."""
    return list(dict.fromkeys(parts_of(name, values)))


def number(name: str, text: str) -> float:
    """Raises InputError for what is none."""
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--{name}: {text!r} is not a number") from None


def drafted_by(config: dict[str, Any]) -> str:
    drafter = config.get("drafter")
    return f"drafter {drafter}" if drafter else f"head {config['head']}"
