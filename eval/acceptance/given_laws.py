"""Laws p and q that are given instead of collected: from a file, or from a published figure."""

import json
from pathlib import Path
from typing import TypedDict

from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.acceptance.result import Coordinates


class Laws(TypedDict):
    """n pairs of laws. p, q: [n][V] probabilities. at: what names each pair in tables."""

    p: list[list[float]]
    q: list[list[float]]
    at: list[Coordinates]


def figure_2() -> Laws:
    """The laws of Khisti et al. 2025, Figure 2, and a toy example.

    A uniform draft on 3 tokens against the target (t1, t2, 1 - t1 - t2), for two t1 and 13 t2.
    """
    p: list[list[float]] = []
    at: list[Coordinates] = []
    for name, t1 in {"1/3": 1 / 3, "1/6": 1 / 6}.items():
        for i in range(13):
            t2 = (1 - t1) * i / 12
            p.append([t1, t2, max(0.0, 1 - t1 - t2)])
            at.append({"t1": name, "t2": t2})
    q = [[1 / 3] * 3 for _ in p]
    return {"p": [*p, [0.1, 0.6, 0.3]], "q": [*q, [0.5, 0.3, 0.2]], "at": [*at, {"law": "toy"}]}


def read_laws(config: AcceptanceConfig) -> Laws:
    """The laws of the file `--laws`, or `figure_2`.

    Raises InputError for a file that cannot be read or does not hold n pairs of laws.
    """
    # 1. The file.
    path = config.laws
    if path is None:
        return figure_2()
    try:
        laws = json.loads(Path(path).read_text())
        p, q = laws["p"], laws["q"]
        at = laws.get("at") or [{"law": number} for number in range(len(p))]
        widths = {len(row) for row in (*p, *q)}
        fits = len(p) == len(q) == len(at) > 0 and len(widths) == 1
        sums = [sum(row) for row in (*p, *q) if min(row) >= 0]
    except OSError as error:
        raise InputError(f"cannot read laws from {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f'{path} must hold {{"p": [[…], …], "q": [[…], …]}}') from error

    # 2. Laws of one vocabulary, without negative numbers, that sum to 1.
    if not fits or len(sums) < 2 * len(p) or any(abs(total - 1) > 1e-3 for total in sums):
        raise InputError(
            f"{path}: p and q must hold equally many laws over the same tokens, each summing to 1"
        )
    return {"p": p, "q": q, "at": at}
