"""Throughput: tokens a second of all texts of a batch together, by batch size."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from treespec.api.spec import Spec
from treespec.eval.bench.config import BenchConfig, whole_numbers
from treespec.eval.bench.figures import median
from treespec.eval.bench.result import BatchFigures
from treespec.eval.bench.rows import ONE_TOKEN, Draft
from treespec.eval.bootstrap import Figure
from treespec.eval.common import in_order, seed_of
from treespec.eval.questions import Question

ROUNDS = 3


@dataclass(frozen=True)
class BatchCase:
    """One method, temperature and batch size.

    name: "one token", or a verifier as `--verifier` names it.
    """

    name: str
    temperature: float
    batch: int


def batch_cases(
    config: BenchConfig, drafts: dict[str, Draft], temperatures: list[float]
) -> list[BatchCase]:
    """One-token decoding and each verifier with each batch size; none without `--batches`.

    Raises InputError for a size that is no whole number from 1.
    """
    sizes = whole_numbers("batches", config.batches, 1) if config.batches else []
    names = (ONE_TOKEN, *drafts)
    return [BatchCase(n, t, size) for t in temperatures for n in names for size in sizes]


def batch_figures(
    spec: Spec,
    drafts: dict[str, Draft],
    cases: list[BatchCase],
    questions: list[Question],
    config: BenchConfig,
    say: Callable[[str], None],
) -> list[BatchFigures]:
    """The throughput of every case: medians over rounds.

    In each round every case answers the first turns of all questions; when a text ends, the next
    question takes its place in the batch. drafts: verifiers and trees by name. say: takes a line
    of progress.
    """
    # 1. Rounds, in each of which all cases take turns.
    prompts = [spec.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]
    tokens: dict[BatchCase, int] = {}
    speeds: dict[BatchCase, list[float]] = defaultdict(list)
    for round_number in range(ROUNDS):
        for case in in_order(cases, round_number):
            tokens[case], seconds = _answer_all(spec, drafts, case, prompts, questions, config)
            speeds[case].append(tokens[case] / seconds)
            say(f"batches of {case.batch}, {case.name} at temperature {case.temperature:g}")

    # 2. Medians of speeds, and of their ratios within a round.
    def over(case: BatchCase, other: BatchCase) -> Figure:
        pairs = zip(speeds[case], speeds[other], strict=True)
        return median([speed / reference for speed, reference in pairs], config.seed)

    smallest = min((case.batch for case in cases), default=1)
    return [
        {
            "name": case.name,
            "temperature": case.temperature,
            "batch": case.batch,
            "tokens": tokens[case],
            "tokens_per_second": median(speeds[case], config.seed),
            "over_one_token": over(case, BatchCase(ONE_TOKEN, case.temperature, case.batch)),
            "over_smallest": over(case, BatchCase(case.name, case.temperature, smallest)),
        }
        for case in cases
    ]


def _answer_all(
    spec: Spec,
    drafts: dict[str, Draft],
    case: BatchCase,
    prompts: list[list[int]],
    questions: list[Question],
    config: BenchConfig,
) -> tuple[int, float]:
    """(new tokens of all prompts, seconds) with nothing cached before."""
    # 1. A decoder, and the seed of each answer.
    fresh = spec.configured(*drafts[case.name]) if case.name in drafts else spec.baseline()
    row = f"{case.name}-t{case.temperature:g}"
    seeds = [seed_of(config.seed, question.question_id, 0, row) for question in questions]

    # 2. The clock runs from the first prompt to the last token.
    started = time.perf_counter()
    outputs = fresh.generate_all(
        prompts,
        batch=case.batch,
        temperature=case.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=seeds,
        memory=None,
    )
    seconds = time.perf_counter() - started
    return sum(output.stats.new_tokens for output in outputs), seconds
