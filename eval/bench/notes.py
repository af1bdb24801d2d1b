"""How to read a benchmark's tables, and its verdict: what is fastest and what does not pay."""

from collections.abc import Sequence

import numpy as np

from treespec.eval.bench.result import BenchResult, RowFigures
from treespec.eval.bench.rows import AGAIN, PLAIN
from treespec.eval.bootstrap import Array, Figure, resample
from treespec.eval.bootstrap import interval as interval_of
from treespec.eval.common import drafted_by
from treespec.eval.verdict import MeasuredPair, interval, noise_of, sentences


def verdict_of(result: BenchResult) -> list[str]:
    """Prefill included: treespec's pairs by `sentences`, then transformers' methods."""
    # 1. treespec's own pairs.
    rows = [row for row in result["rows"] if row["speed"]]
    own = [row for row in rows if row["cycle"] and row["name"] not in PLAIN]
    noises = {
        row["temperature"]: noise_of(_over_one_token(row)) for row in rows if row["name"] == AGAIN
    }
    pairs = [_pair_of(row, own) for row in own]
    lines = sentences(pairs, result["questions"], noises)

    # 2. transformers' methods at each temperature.
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        peers = [row for row in rows if row["peer"] and row["temperature"] == temperature]
        if said := [f"{row['name']} {interval(_over_one_token(row))}" for row in peers]:
            at = f"At temperature {temperature:g} transformers' own methods"
            lines.append(f"{at} have this many times plain decoding's tokens/s: {', '.join(said)}.")
    return lines


def _pair_of(row: RowFigures, own: Sequence[RowFigures]) -> MeasuredPair:
    """A row for the verdict, by its totals over totals. own: the rows of all pairs."""
    # 1. Tokens/s, its own and over those of the fastest pair at the same temperature.
    here = [other for other in own if other["temperature"] == row["temperature"]]
    draws = resample(len(row["answers"]), 1000, seed=0)
    fastest = max(here, key=lambda other: _speeds(other, draws)[0])
    ratio = _speeds(row, draws) / _speeds(fastest, draws)

    # 2. The pair.
    assert row["cycle"]
    tau = row["cycle"]["acceptance_length"]["value"]
    return MeasuredPair(
        row["name"],
        row["temperature"],
        float(_speeds(row, draws)[0]),
        _over_one_token(row),
        tau or 1.0,
        of_fastest=None if row is fastest else interval_of(ratio),
        paused=row["undrafted"] if row["name"].startswith("auto") else 0.0,
    )


def _speeds(row: RowFigures, draws: Array) -> Array:
    """[1 + R] tokens/s in each resample. draws: [1 + R, Q]."""
    answers = [(answer["tokens"], answer["seconds"]) for answer in row["answers"]]
    tokens, seconds = np.array(answers, dtype=float).T
    return (draws @ tokens) / (draws @ seconds)


def _over_one_token(row: RowFigures) -> Figure | None:
    return row["speed"] and row["speed"]["overall"]["over_one_token"]


def notes_of(result: BenchResult) -> list[str]:
    """What a reader must know to read the figures."""
    # 1. What was measured, and on what.
    config = result["config"]
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, assistant "
        f"{config['assistant'] or 'none'}, questions {config['questions']} "
        f"({result['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers "
        "{transformers}, treespec {treespec}; all rows took turns.".format(**result["environment"]),
    ]

    # 2. How to read the tables.
    lines += [
        f"Figures are medians: of forwards over {config['rounds']} rounds, of all else over "
        "questions. Brackets hold 95% bootstrap intervals. τ and the columns from `overall` on are "
        "totals over totals of all questions: a sampled answer may end after a few tokens, and a "
        "median over questions counts it like a long one.",
        "Bound: τ · T(1) / (T(N) + T_draft). T(1) is the target's forward in one-token decoding, "
        "T(N) its forward over the tree, T_draft all forwards of the head in a cycle. Speedup: "
        "tokens/s over those of one-token decoding, without prefill. Overhead: the share of a "
        "cycle outside these forwards.",
        "By model.generate, by one token: tokens/s over theirs on the same question, from prompt "
        "to last token. Identical: greedy answers with the same tokens as one-token decoding; in a "
        "lower precision than float32, rounding alone may change them. Peers run on a model of their "
        "own, as transformers loads it by default, in the checkpoint's dtype; assisted generation "
        "has transformers' defaults.",
    ]
    if any(row["name"] == AGAIN for row in result["rows"]):
        lines.append(
            f"{AGAIN}: how far the overall interval of its ratio to {PLAIN[0]} reaches from 1 is the "
            "clock's noise, which the other intervals, over questions, do not hold."
        )
    if config["batches"]:
        lines.append(
            "Batches: one forward serves that number of texts; the next text takes the place of "
            "one that has ended. Tokens/s: tokens of all texts by the clock, prefill included. By "
            "one token: over one-token decoding with the same number of texts."
        )

    # 3. What does not hold for all rows.
    for row in result["rows"]:
        if row["failed"]:
            at = f"{row['name']} at temperature {row['temperature']:g}"
            lines.append(f"{at} failed: {row['failed']}.")
    if left_out := result["left_out"]:
        lines.append(f"Questions left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines
