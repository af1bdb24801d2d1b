"""Laws p and q that are given instead of collected: a file's, or those of a published figure."""

import json
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig


def figure_2() -> dict[str, Any]:
    """Khisti et al. 2025, Figure 2: a uniform draft on 3 tokens against (t1, t2, 1 - t1 - t2); and a toy example."""
    p, at = [], []
    for name, t1 in {"1/3": 1 / 3, "1/6": 1 / 6}.items():
        for i in range(13):
            t2 = (1 - t1) * i / 12
            p.append([t1, t2, max(0.0, 1 - t1 - t2)])
            at.append({"t1": name, "t2": t2})
    q = [[1 / 3] * 3 for _ in p]
    return {"p": [*p, [0.1, 0.6, 0.3]], "q": [*q, [0.5, 0.3, 0.2]], "at": [*at, {"law": "toy"}]}


def read_laws(config: AcceptanceConfig) -> dict[str, Any]:
    """{"p": [n][V], "q": [n][V], "at": n dicts of what names each law}. Raises InputError."""
    if config.laws is None:
        return figure_2()
    try:
        laws = json.loads(Path(config.laws).read_text())
        p, q = laws["p"], laws["q"]
        at = laws.get("at") or [{"law": number} for number in range(len(p))]
        widths = {len(row) for row in (*p, *q)}
        fits = len(p) == len(q) == len(at) > 0 and len(widths) == 1
        sums = [sum(row) for row in (*p, *q) if min(row) >= 0]
    except OSError as error:
        raise InputError(f"cannot read laws from {config.laws}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f'{config.laws} must hold {{"p": [[…], …], "q": [[…], …]}}') from error
    if not fits or len(sums) < 2 * len(p) or any(abs(total - 1) > 1e-3 for total in sums):
        raise InputError(
            f"{config.laws}: p and q must be as many laws over the same tokens, each summing to 1"
        )
    return {"p": p, "q": q, "at": at}
