"""Compute the figures of one system from its completions: acceptance, speed, and a cycle's milliseconds."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from treespec.eval.intervals import Array, Figure, compute_interval, leave_one_out
from treespec.eval.ledger import Completion

# the stages of a cycle, in the table's order
CYCLE_PARTS = ("draft model", "rest of drafting", "target", "verify", "commit", "rest")


def compute_figures(
    completions: Sequence[Completion], base: Sequence[Completion] | None
) -> dict[str, Any]:
    """Compute the figures of one system from its completions of Q questions.

    Every figure but the mean rates is a ratio of totals over questions. The jackknife leaves out whole questions, for
    the system and its baseline at once, because the tokens and cycles of one completion are not independent. base: the
    baseline's completions of the same questions in the same order; None without a baseline.

    Returns:
        Values with an interval (`Figure`; None if it needs a missing baseline):
        - acceptance_length: τ, tokens per cycle.
        - acceptance_rate_by_depth: accepted tokens at depth d over those at depth d - 1.
        - tokens_per_second: by the wall clock.
        - speedup: tokens_per_second relative to the baseline's.
        - mean_rate: the mean over questions of their tokens per second, as Spec-Bench's evaluation/speed.py has it.
        - mean_rate_speedup: mean_rate relative to the baseline's.
        - decoding_speedup: the same without prefill.
        - bound: decoding_speedup if a cycle cost only its forwards.

        Numbers:
        - questions, tokens, cycles, seconds, prefill_seconds: totals.
        - nodes: mean size of a cycle's tree, root included.
        - undrafted: share of the cycles without a draft token.
        - cycle_ms: milliseconds of a cycle by stage.
        - first_token: mean seconds to it: treespec's prefill and a cycle, a server's by its client, else None.
    """
    weights = leave_one_out(len(completions))
    sums = sum_completions(completions, weights)
    base_sums = None
    if base is not None:
        base_sums = sum_completions(base, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = compute_ratios(sums, base_sums) | compute_mean_rates(completions, base, weights)
        rates = compute_depth_rates(completions, sums["cycles"], weights)
        totals = {name: samples[0] for name, samples in sums.items()}
        cycles = totals["cycles"]
        cycle_ms = {stage: 1000 * totals[stage] / cycles for stage in CYCLE_PARTS}
        return {
            **ratios,
            "acceptance_rate_by_depth": rates,
            "questions": len(completions),
            "tokens": int(totals["new_tokens"]),
            "cycles": int(cycles),
            "seconds": totals["wall"],
            "nodes": 1 + totals["drafted"] / cycles,
            "undrafted": totals["undrafted"] / cycles,
            "prefill_seconds": totals["prefill"],
            "cycle_ms": cycle_ms,
            "first_token": find_first_token_seconds(completions, totals["prefill"], cycle_ms),
        }


def compute_ratios(
    sums: Mapping[str, Array], base: Mapping[str, Array] | None
) -> dict[str, Figure | None]:
    """Compute those figures of `compute_figures` that are ratios of totals; None if one needs a missing baseline."""
    tokens = sums["new_tokens"]
    wall = sums["wall"]
    ratios: dict[str, Figure | None] = {"speedup": None, "decoding_speedup": None, "bound": None}
    if base is not None:
        one_token = 1 / base["new_tokens"]  # one token's share of plain decoding
        ratios["speedup"] = compute_interval(tokens / wall * base["wall"] * one_token)
        decoding = (base["wall"] - base["prefill"]) * one_token
        ratios["decoding_speedup"] = compute_interval(tokens / (wall - sums["prefill"]) * decoding)
        forward = base["target"] / base["cycles"]
        ratios["bound"] = compute_interval(
            tokens / (sums["target"] + sums["draft model"]) * forward
        )
    ratios["acceptance_length"] = compute_interval(tokens / sums["cycles"])
    ratios["tokens_per_second"] = compute_interval(tokens / wall)
    return ratios


def compute_mean_rates(
    completions: Sequence[Completion], base: Sequence[Completion] | None, weights: Array
) -> dict[str, Figure | None]:
    """Compute Spec-Bench's speed: the mean over questions of tokens per second, and that over the baseline's.

    A question of ten tokens counts there as one of a thousand does. weights: [1 + Q, Q] of `leave_one_out`.
    """
    means = average_rates(completions, weights)
    speedup = None
    if base is not None:
        speedup = compute_interval(means / average_rates(base, weights))
    return {"mean_rate": compute_interval(means), "mean_rate_speedup": speedup}


def average_rates(completions: Sequence[Completion], weights: Array) -> Array:
    """Average the tokens per second of each question: [1 + Q] means, one for each row of weights [1 + Q, Q]."""
    rates = []
    for completion in completions:
        rates.append(sum(completion["new_tokens"]) / np.float64(sum(completion["wall"])))
    return weights @ np.array(rates, dtype=float) / weights.sum(axis=1)


def compute_depth_rates(
    completions: Sequence[Completion], cycles: Array, weights: Array
) -> list[Figure]:
    """Compute the acceptance rate at depth 1, 2, …: accepted tokens at depth d over those at depth d - 1.

    Five cycles that accept 2, 1, 0, 1 and 0 tokens:

        depth         0    1    2
        accepted      5    3    1        rates 3/5, 1/3

    cycles: [1 + Q] total number of cycles by rows of weights. weights: [1 + Q, Q] of `leave_one_out`.
    """
    rates = []
    reached = cycles
    counts_by_question = [completion["accepted"] for completion in completions]
    for counts in zip_longest(*counts_by_question, fillvalue=0):
        accepted = weights @ np.array(counts, dtype=float)
        rates.append(compute_interval(accepted / reached, most=1.0))
        reached = accepted
    return rates


def find_first_token_seconds(
    completions: Sequence[Completion], prefill: float, cycle_ms: Mapping[str, float]
) -> float | None:
    """Find the mean seconds to the first token of a turn, or None. prefill: of all turns. cycle_ms: by stage."""
    turns = sum(len(completion["turns"]) for completion in completions)
    seconds = sum(completion["seconds"].get("first", 0.0) for completion in completions) / turns
    if sum(sum(completion["cycles"]) for completion in completions):
        seconds = prefill / turns + sum(cycle_ms.values()) / 1000
    if not seconds:
        return None
    return seconds


def sum_completions(completions: Sequence[Completion], weights: Array) -> dict[str, Array]:
    """Sum the values of `count_completion` over questions: [1 + Q] totals, one for each row of weights [1 + Q, Q]."""
    rows = [count_completion(completion) for completion in completions]
    sums = {}
    for name in rows[0]:
        sums[name] = weights @ np.array([row[name] for row in rows], dtype=float)
    return sums


def count_completion(completion: Completion) -> dict[str, float]:
    """Count tokens, cycles and seconds of one completion. The stages' seconds and the prefill's add up to `wall`."""
    # 1. Seconds by stage.
    seconds = completion["seconds"]
    counts = {}
    for stage in ("prefill", "target", "verify", "commit"):
        counts[stage] = seconds.get(stage, 0.0)
    counts["draft model"] = seconds.get("head", 0.0)
    counts["rest of drafting"] = seconds.get("draft", 0.0) - counts["draft model"]
    stage_seconds = sum(counts.values())

    # 2. Sums over turns, and the remaining seconds, which belong to no stage.
    for name in ("wall", "new_tokens", "cycles", "drafted"):
        counts[name] = sum(completion[name])
    counts["rest"] = counts["wall"] - stage_seconds
    counts["undrafted"] = completion["undrafted"]
    return counts
