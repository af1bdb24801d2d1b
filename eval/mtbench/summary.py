"""From answer files to figures: acceptance, speed and where the time goes, with bootstrap intervals.

Questions are the clusters: the tokens and cycles of one answer are not independent, so whole questions are
resampled, the same ones for a configuration and its baseline. All figures are ratios of totals over
questions, which a resample recomputes: its totals are its counts times the totals by question.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.eval.bootstrap import Array, interval, resample
from treespec.eval.common import STAGES
from treespec.eval.mtbench.answers import Answer, read
from treespec.eval.mtbench.config import Configuration, configurations
from treespec.eval.mtbench.record import saved_config
from treespec.files import read_json
from treespec.verify.registry import verifier_by_name

FEW = 10  # with fewer questions a percentile interval is markedly too narrow


def summarise(out: Path, resamples: int = 1000) -> dict[str, Any]:
    """The figures of an evaluation, from its files alone; lengths in tokens, times as their names say.

    {config, environment, questions, left_out, few_questions, configurations: [{model_id, drafter, verifier,
    lossless, tree, temperature, overall, categories: {name: …}, same_as_baseline, of_fastest, ended}]}; `overall`
    and each category are `figures`. of_fastest: tokens/s over those of the fastest lossless pair at the same
    temperature. Only questions that every configuration has answered count. Raises InputError if there is none.
    """
    record = read_json(out / "config.json", "choose another --out")
    config = saved_config(record)
    asked = [c for c in configurations(config) if c.model_id not in record.get("unfit", ())]
    answered = {c: _answers(out / "answers" / f"{c.model_id}.jsonl") for c in asked}
    first, *others = answered.values()
    questions = [i for i in first if all(i in other for other in others)]
    if not questions:
        raise InputError(
            f"{out}: no question is answered; is every one longer than the target's context?"
        )
    groups: dict[str, list[int | str]] = {}
    for i in questions:
        groups.setdefault(first[i].category, []).append(i)
    baselines = {c.temperature: by_id for c, by_id in answered.items() if c.verifier is None}
    answered_by = {configuration.model_id: by_id for configuration, by_id in answered.items()}
    rows: list[dict[str, Any]] = []
    for configuration, by_id in answered.items():
        baseline = baselines.get(configuration.temperature)

        def of(
            chosen: Sequence[int | str], by_id: Any = by_id, baseline: Any = baseline
        ) -> dict[str, Any]:
            draws = resample(len(chosen), resamples, config.seed)
            compare = baseline is not None and baseline is not by_id
            against = [baseline[i] for i in chosen] if compare else None
            return figures([by_id[i] for i in chosen], against, draws)

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
            }
        )
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
        "configurations": rows,
    }


def _beside_fastest(
    rows: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pair of verifier and tree but the fastest, with the fastest lossless one at its temperature."""
    pairs = [row for row in rows if row["verifier"] != "baseline"]
    for temperature in dict.fromkeys(row["temperature"] for row in pairs):
        here = [row for row in pairs if row["temperature"] == temperature]
        lossless = [row for row in here if row["lossless"]]
        best = max(
            lossless, key=lambda row: row["overall"]["tokens_per_second"]["value"], default=None
        )
        yield from ((row, best) for row in here if best and row is not best)


def _lossless(configuration: Configuration) -> bool:
    return (
        configuration.verifier is None
        or verifier_by_name(configuration.verifier, True).scheme.lossless
    )


def figures(
    mine: Sequence[Answer], baseline: Sequence[Answer] | None, draws: Array
) -> dict[str, Any]:
    """What Q answers of one configuration amount to. baseline: the same questions' answers, same order.

    nodes: in the tree of one forward, the root too, on average. acceptance_length: τ, tokens by cycle.
    acceptance_rate_by_depth: α, of the cycles that accepted the depth above, those that accepted this one.
    speedup: tokens/s over the baseline's, totals over totals; speedup_by_question: the mean of the
    questions' own. cycle_ms, cycle_share: where a cycle's time goes. overhead: its share outside the
    forwards of target and draft model.
    """
    tokens, cycles, wall = _totals(mine)
    accepted = _columns(mine, "accepted")
    reached = np.column_stack([cycles, accepted])
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = (draws @ tokens) / (draws @ wall)
        rates = (draws @ accepted) / (draws @ reached[:, :-1])
        result: dict[str, Any] = {
            "questions": len(mine),
            "tokens": int(tokens.sum()),
            "cycles": int(cycles.sum()),
            "seconds": float(wall.sum()),
            "acceptance_length": interval((draws @ tokens) / (draws @ cycles)),
            "acceptance_rate_by_depth": [interval(rate) for rate in rates.T],
            "nodes": float(1 + _columns(mine, "drafted").sum() / cycles.sum()),
            "drafted_by_depth": _columns(mine, "drafted").sum(0).astype(int).tolist(),
            "accepted_by_depth": accepted.sum(0).astype(int).tolist(),
            "tokens_per_second": interval(speed),
            "speedup": None,
            "speedup_by_question": None,
        }
        if baseline is not None:
            base_tokens, _, base_wall = _totals(baseline)
            ratios = (tokens / wall) / (base_tokens / base_wall)
            result["speedup"] = interval(speed / ((draws @ base_tokens) / (draws @ base_wall)))
            result["speedup_by_question"] = interval((draws @ ratios) / len(mine))
    return result | _times(mine, wall.sum(), cycles.sum())


def _times(mine: Sequence[Answer], wall: float, cycles: float) -> dict[str, Any]:
    """Every second of the generations is in one of the stages or in prefill."""

    def spent(stage: str) -> float:
        return sum(answer.extra["seconds"].get(stage, 0.0) for answer in mine)

    seconds = {"head": spent("head"), "rest_of_drafting": spent("draft") - spent("head")}
    seconds |= {stage: spent(stage) for stage in ("target", "verify", "commit")}
    decoding = wall - spent("prefill")
    seconds["rest"] = decoding - sum(seconds.values())
    return {
        "prefill_seconds": spent("prefill"),
        "cycle_ms": {stage: 1000 * seconds[stage] / cycles for stage in STAGES},
        "cycle_share": {stage: seconds[stage] / decoding for stage in STAGES},
        "overhead": 1 - (seconds["head"] + seconds["target"]) / decoding,
    }


def _answers(file: Path) -> dict[int | str, Answer]:
    """By question, without those whose first turn did not fit the context."""
    return {answer.question_id: answer for answer in read(file) if sum(answer.new_tokens)}


def _totals(answers: Sequence[Answer]) -> tuple[Array, Array, Array]:
    """Tokens, cycles and seconds of each answer, [Q] each."""
    rows = [(sum(a.new_tokens), sum(a.decoding_steps), sum(a.wall_time)) for a in answers]
    tokens, cycles, wall = np.array(rows, dtype=float).T
    return tokens, cycles, wall


def _columns(answers: Sequence[Answer], name: str) -> Array:
    """[Q, D] counts by depth, 0 where an answer has fewer."""
    by_depth = zip_longest(*(answer.extra[name] for answer in answers), fillvalue=0)
    return np.array(list(by_depth), dtype=float).reshape(-1, len(answers)).T


def _same(
    configuration: Configuration,
    by_id: dict[int | str, Answer],
    baseline: dict[int | str, Answer] | None,
    questions: Sequence[int | str],
) -> dict[str, int] | None:
    """At temperature 0, how many turns have the baseline's tokens."""
    if configuration.temperature > 0 or configuration.verifier is None or baseline is None:
        return None
    pairs = [
        pair
        for i in questions
        for pair in zip(by_id[i].extra["token_ids"], baseline[i].extra["token_ids"], strict=True)
    ]
    return {"same": sum(ours == theirs for ours, theirs in pairs), "answers": len(pairs)}


def _ended(answers: Sequence[Answer]) -> dict[str, int]:
    """How many turns ended by what."""
    ends = [end for answer in answers for end in answer.extra["ended"]]
    return {end: ends.count(end) for end in ("model", "max_new_tokens", "context")}
