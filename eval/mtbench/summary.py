"""From answer files to figures: acceptance, speed, a cycle's time, with bootstrap intervals.

The bootstrap resamples whole questions, because the tokens and cycles of one answer are not
independent. A configuration and its baseline get the same resamples. Every figure is a ratio of
totals over questions; a resample weights the totals of each question by how often it was drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from treespec.errors import InputError
from treespec.eval.bootstrap import Array, interval, resample
from treespec.eval.common import STAGES, Stage
from treespec.eval.mtbench.answers import Answer, read
from treespec.eval.mtbench.config import Configuration, EvalConfig, configurations
from treespec.eval.mtbench.judge import verdicts
from treespec.eval.mtbench.result import Again, Ended, Figures, Right, Row, Same, Summary
from treespec.eval.mtbench.right import right_figures
from treespec.eval.questions import task_of
from treespec.eval.verdict import FEW
from treespec.files.atomic import read_json
from treespec.verify.facts import known_verifier

Answers = dict[int | str, Answer]  # by question


def summarise(out: Path, resamples: int = 1000) -> Summary:
    """The figures of an evaluation, from its files alone.

    Only questions that every configuration has answered count. Raises InputError if there is none.
    """
    # 1. The answers, by configuration and question.
    record = read_json(out / "config.json", "choose another --out")
    config = EvalConfig(**record["config"])
    asked = [c for c in configurations(config) if c.model_id not in record.get("unfit", ())]
    answered = {c: _answers(out / "answers" / f"{c.model_id}.jsonl") for c in asked}
    seconds = {c.temperature: answered.pop(c) for c in asked if c.again}
    first, *others = answered.values()
    questions = [i for i in first if all(i in other for other in others)]
    if not questions:
        raise InputError(
            f"{out}: no question is answered; is every one longer than the target's context?"
        )

    # 2. Their groups and baselines.
    groups: dict[str, list[int | str]] = {}
    for i in questions:
        groups.setdefault(task_of(config.questions, first[i].category), []).append(i)
    baselines = {c.temperature: by_id for c, by_id in answered.items() if c.verifier is None}
    judged = verdicts(out)

    # 3. A row for each configuration.
    rows: list[Row] = []
    for configuration, by_id in answered.items():
        baseline = baselines.get(configuration.temperature)
        of = partial(_figures, by_id, baseline, resamples, config.seed)
        rows.append(
            {
                "model_id": configuration.model_id,
                "drafter": configuration.drafter,
                "verifier": configuration.verifier or "baseline",
                "lossless": _lossless(configuration),
                "tree": configuration.tree if configuration.verifier else None,
                "temperature": configuration.temperature,
                "overall": of(questions),
                "categories": {name: of(chosen) for name, chosen in groups.items()},
                "same_as_baseline": _same(configuration, by_id, baseline, questions),
                "of_fastest": None,
                "ended": _ended([by_id[i] for i in questions]),
                "right": _right(judged, questions, by_id, baseline),
            }
        )

    # 4. Each pair beside the fastest one.
    answered_by = {configuration.model_id: by_id for configuration, by_id in answered.items()}
    draws = resample(len(questions), resamples, config.seed)
    for row, best in _beside_fastest(rows):
        mine, theirs = (
            [answered_by[name][i] for i in questions]
            for name in (row["model_id"], best["model_id"])
        )
        row["of_fastest"] = figures(mine, theirs, draws)["speedup"]
    return {
        "config": record["config"] | {"resamples": resamples},
        "environment": record["environment"],
        "questions": len(questions),
        "left_out": record["left_out"],
        "few_questions": [
            name for name, chosen in {"overall": questions, **groups}.items() if len(chosen) < FEW
        ],
        "again": [
            _again(temperature, by_id, baselines[temperature], resamples, config.seed)
            for temperature, by_id in seconds.items()
            if by_id
        ],
        "configurations": rows,
    }


def _again(temperature: float, second: Answers, first: Answers, resamples: int, seed: int) -> Again:
    """The baseline's second time beside its first, on the questions of both."""
    both = [i for i in second if i in first]
    speedup = _figures(second, first, resamples, seed, both)["speedup"]
    return {"temperature": temperature, "questions": len(both), "speedup": speedup}


def _figures(
    by_id: Answers, baseline: Answers | None, resamples: int, seed: int, chosen: Sequence[int | str]
) -> Figures:
    """`figures` of some questions. The baseline has none to compare itself with."""
    draws = resample(len(chosen), resamples, seed)
    compare = baseline is not None and baseline is not by_id
    against = [baseline[i] for i in chosen] if baseline is not None and compare else None
    return figures([by_id[i] for i in chosen], against, draws)


def _right(
    judged: Mapping[str, bool],
    questions: Sequence[int | str],
    by_id: Answers,
    baseline: Answers | None,
) -> Right | None:
    """The share of right answers, over questions whose answers were checked on both sides."""
    beside = by_id if baseline is None else baseline
    checked = [
        i for i in questions if by_id[i].answer_id in judged and beside[i].answer_id in judged
    ]
    if not checked:
        return None
    mine = [judged[by_id[i].answer_id] for i in checked]
    theirs = [judged[beside[i].answer_id] for i in checked]
    return right_figures(mine, None if beside is by_id else theirs)


def _beside_fastest(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each other pair of verifier and tree, with the fastest lossless one at its temperature."""
    pairs = [row for row in rows if row["verifier"] != "baseline"]
    for temperature in dict.fromkeys(row["temperature"] for row in pairs):
        here = [row for row in pairs if row["temperature"] == temperature]
        best = max((row for row in here if row["lossless"]), key=_speed, default=None)
        yield from ((row, best) for row in here if best is not None and row is not best)


def _speed(row: Row) -> float:
    return row["overall"]["tokens_per_second"]["value"] or 0.0


def _lossless(configuration: Configuration) -> bool:
    name = configuration.verifier
    return name is None or known_verifier(name, allow_lossy=True).scheme.lossless


def figures(mine: Sequence[Answer], baseline: Sequence[Answer] | None, draws: Array) -> Figures:
    """What one configuration's answers to Q questions come to.

    baseline: the baseline's answers to the same questions, in the same order. draws: [1 + R, Q],
    by `resample`.
    """
    # 1. Totals by question.
    tokens, cycles, wall = _totals(mine)
    drafted, accepted = _columns(mine, "drafted"), _columns(mine, "accepted")
    reached = np.column_stack([cycles, accepted])  # [Q, 1 + D], cycles that reached each depth

    # 2. Ratios of totals in each resample. A depth that no cycle reached has no rate.
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = (draws @ tokens) / (draws @ wall)
        rates = (draws @ accepted) / (draws @ reached[:, :-1])
        length = (draws @ tokens) / (draws @ cycles)
        speedup = by_question = None
        if baseline is not None:
            base_tokens, _, base_wall = _totals(baseline)
            ratios = (tokens / wall) / (base_tokens / base_wall)
            speedup = interval(speed / ((draws @ base_tokens) / (draws @ base_wall)))
            by_question = interval((draws @ ratios) / len(mine))

    # 3. A cycle's time.
    seconds, prefill = _seconds(mine, wall.sum())
    decoding = float(wall.sum()) - prefill
    return {
        "questions": len(mine),
        "tokens": int(tokens.sum()),
        "cycles": int(cycles.sum()),
        "seconds": float(wall.sum()),
        "acceptance_length": interval(length),
        "acceptance_rate_by_depth": [interval(rate) for rate in rates.T],
        "nodes": float(1 + drafted.sum() / cycles.sum()),
        "undrafted": sum(answer.extra.get("undrafted", 0) for answer in mine) / float(cycles.sum()),
        "drafted_by_depth": drafted.sum(0).astype(int).tolist(),
        "accepted_by_depth": accepted.sum(0).astype(int).tolist(),
        "tokens_per_second": interval(speed),
        "speedup": speedup,
        "speedup_by_question": by_question,
        "prefill_seconds": prefill,
        "cycle_ms": {stage: 1000 * seconds[stage] / cycles.sum() for stage in STAGES},
        "cycle_share": {stage: seconds[stage] / decoding for stage in STAGES},
        "overhead": 1 - (seconds["head"] + seconds["target"]) / decoding,
    }


def _seconds(mine: Sequence[Answer], wall: float) -> tuple[dict[Stage, float], float]:
    """(seconds of all cycles by stage, seconds of prefill). They add up to `wall`."""

    def spent(name: str) -> float:
        return sum(answer.extra["seconds"].get(name, 0.0) for answer in mine)

    prefill, head = spent("prefill"), spent("head")
    seconds: dict[Stage, float] = {
        "head": head,
        "rest_of_drafting": spent("draft") - head,
        "target": spent("target"),
        "verify": spent("verify"),
        "commit": spent("commit"),
    }
    seconds["rest"] = wall - prefill - sum(seconds.values())
    return seconds, prefill


def _answers(file: Path) -> Answers:
    """By question, without those whose first turn did not fit the context."""
    return {answer.question_id: answer for answer in read(file) if sum(answer.new_tokens)}


def _totals(answers: Sequence[Answer]) -> tuple[Array, Array, Array]:
    """Tokens, cycles and seconds of each answer, [Q] each."""
    rows = [(sum(a.new_tokens), sum(a.decoding_steps), sum(a.wall_time)) for a in answers]
    tokens, cycles, wall = np.array(rows, dtype=float).T
    return tokens, cycles, wall


def _columns(answers: Sequence[Answer], name: Literal["drafted", "accepted"]) -> Array:
    """[Q, D] counts by depth, 0 where an answer has fewer."""
    by_depth = zip_longest(*(answer.extra[name] for answer in answers), fillvalue=0)
    return np.array(list(by_depth), dtype=float).reshape(-1, len(answers)).T


def _same(
    configuration: Configuration,
    by_id: Answers,
    baseline: Answers | None,
    questions: Sequence[int | str],
) -> Same | None:
    """At temperature 0, the number of turns with the baseline's tokens."""
    if configuration.temperature > 0 or configuration.verifier is None or baseline is None:
        return None
    pairs = [
        pair
        for i in questions
        for pair in zip(by_id[i].extra["token_ids"], baseline[i].extra["token_ids"], strict=True)
    ]
    return {"same": sum(ours == theirs for ours, theirs in pairs), "answers": len(pairs)}


def _ended(answers: Sequence[Answer]) -> Ended:
    ends = [end for answer in answers for end in answer.extra["ended"]]
    return {
        "model": ends.count("model"),
        "max_new_tokens": ends.count("max_new_tokens"),
        "context": ends.count("context"),
    }
