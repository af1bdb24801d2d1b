"""Trees for a page: a short completion of each pair, traced after the measurement is over."""

import platform
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from treespec.api.spec import trace
from treespec.eval.answering import Fresh
from treespec.eval.common import seed_of
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import Contestant
from treespec.eval.questions import Question
from treespec.model.processor import processor
from treespec.requests.events import Cycle
from treespec.requests.request import Options

TOKENS = 40  # of a traced completion, at most
CYCLES = 16  # of a traced completion, at most


def machine() -> dict[str, str]:
    """This machine: the processor with its cores and features, and the system."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def traces(
    chosen: Sequence[Contestant], fresh: Fresh, questions: Sequence[Question], config: EvalConfig
) -> Iterator[dict[str, Any]]:
    """The ledger's entries `traced`: how each pair answers the first question that leaves room.

    Their times are no figures: recording slows a generation down.
    """
    # 1. The question.
    pairs = [one for one in chosen if one.drafter and one.batch == chosen[0].batch]
    spec = fresh(pairs[0])
    prompts = {q.question_id: [{"role": "user", "content": q.turns[0]}] for q in questions}
    room = spec.target.context_length
    fits = (i for i, prompt in prompts.items() if len(spec.encode(prompt)) < room)
    if (asked := next(fits, None)) is None:
        return

    # 2. A trace of each pair.
    for one in pairs:
        options: Options = {
            "temperature": one.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "max_new_tokens": TOKENS,
            "memory": None,
        }
        seed = seed_of(config.seed, asked, 0, one.name)
        cycles = trace(fresh(one), prompts[asked], seed=seed, **options)
        yield {"contestant": one.name, "prompt": prompts[asked][0]["content"]} | traced(
            list(islice(cycles, CYCLES))
        )


def traced(cycles: Sequence[Cycle]) -> dict[str, Any]:
    """What a page shows of a trace: the completion by pieces, and a few cycles."""
    pieces = [(piece, piece is cycle.answer[0]) for cycle in cycles for piece in cycle.answer]
    return {
        "tokens": sum(cycle.new_tokens for cycle in cycles),
        "cycles": len(cycles),
        "answer": [
            {"text": piece.text, "drafted": piece.drafted, "first": first}
            for piece, first in pieces
        ],
        "chosen": [{"why": why, "cycle": cycle.to_json()} for why, cycle in chosen_cycles(cycles)],
    }


def chosen_cycles(cycles: Sequence[Cycle]) -> list[tuple[str, Cycle]]:
    """Cycles with the longest, the median and the shortest path, where these differ in length."""
    drafted = [cycle for cycle in cycles if len(cycle.tokens) > 1]
    if not drafted:
        return []
    by_length = sorted(drafted, key=lambda cycle: len(cycle.path))
    wanted = {
        "the longest accepted path": max(drafted, key=lambda cycle: len(cycle.path)),
        "the shortest path": by_length[0],
        "the median path": by_length[len(by_length) // 2],
    }
    found: dict[int, tuple[str, Cycle]] = {}
    for why, cycle in wanted.items():
        found.setdefault(len(cycle.path), (why, cycle))
    return sorted(found.values(), key=lambda one: one[1].number)
