"""Throughput: how many tokens a second all texts of a batch have together, by their number."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treespec.eval.bench.config import BenchConfig, whole_numbers
from treespec.eval.bench.figures import median
from treespec.eval.bench.rows import ONE_TOKEN, Draft, label
from treespec.eval.common import in_order, seed_of
from treespec.eval.questions import Question
from treespec.spec import Spec

ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """name: what answers, and how many texts it takes at a time."""

    name: str
    temperature: float
    batch: int


def cases(config: BenchConfig, found: dict[str, Draft], heats: list[float]) -> list[Case]:
    """One-token decoding and each verifier with each size of batch; none where no size is given. Raises InputError."""
    sizes = whole_numbers("batches", config.batches, 1) if config.batches else []
    return [
        Case(name, heat, size) for heat in heats for name in (ONE_TOKEN, *found) for size in sizes
    ]


def batches(
    spec: Spec,
    found: dict[str, Draft],
    chosen: list[Case],
    questions: list[Question],
    config: BenchConfig,
    added: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """[{name, label, temperature, batch, tokens, tokens_per_second, over_one_token, over_smallest}], by case.

    Rounds in which each case answers the first turns of all questions; the place of an answered one is taken by the
    next. tokens: of the last round. Figures are medians over rounds: of tokens by the clock, prefill included; and
    of their ratios to one-token decoding with the same batch and to the same row with the smallest.
    """
    prompts = [
        spec.encode([{"role": "user", "content": question.turns[0]}]) for question in questions
    ]
    tokens: dict[Case, int] = {}
    speeds: dict[Case, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for case in in_order(chosen, number):
            fresh = spec.configured(*found[case.name]) if case.name in found else spec.baseline()
            name = f"{case.name}-t{case.temperature:g}"
            started = time.perf_counter()
            outputs = fresh.generate_all(
                prompts,
                batch=case.batch,
                temperature=case.temperature,
                max_new_tokens=config.max_new_tokens,
                seed=[
                    seed_of(config.seed, question.question_id, 0, name) for question in questions
                ],
            )
            seconds = time.perf_counter() - started
            tokens[case] = sum(output.stats.new_tokens for output in outputs)
            speeds[case].append(tokens[case] / seconds)
            say(
                f"batches of {case.batch}, {label(case.name, added)} at temperature {case.temperature:g}"
            )

    def over(case: Case, other: Case) -> Any:
        return median(
            [a / b for a, b in zip(speeds[case], speeds[other], strict=True)], config.seed
        )

    smallest = min((case.batch for case in chosen), default=1)
    return [
        {
            "name": case.name,
            "label": label(case.name, added),
            "temperature": case.temperature,
            "batch": case.batch,
            "tokens": tokens[case],
            "tokens_per_second": median(speeds[case], config.seed),
            "over_one_token": over(case, Case(ONE_TOKEN, case.temperature, case.batch)),
            "over_smallest": over(case, Case(case.name, case.temperature, smallest)),
        }
        for case in chosen
    ]
