"""Make the rows of OUT/tau.json: ratios of totals over texts, with intervals over groups of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treespec.eval.acceptance.tau_pairs import Costs, MeasuredPair
from treespec.eval.intervals import Array, Figure, compute_interval, leave_one_out

TauRow = dict[str, Any]
TotalsTable = NDArray[np.void]  # has the fields of `describe_totals`


@dataclass(frozen=True)
class TextTotals:
    """The expected cycles of decoding one text with a pair, and their nodes and seconds.

    Attributes:
        tokens: number of tokens of the text that count.
        nodes: expected number of nodes of all trees.
        fewest_cycles: expected cycles that any lossless verifier of the pair's draws needs at least; NaN if unknown.
        cycles: [B] expected cycles at each batch size.
        seconds: [B] predicted seconds at each batch size.
        cycles_by_length: [D + 1] expected cycles of 1, 2, … tokens, without those that the end of the text may cut. D
            is the largest number of draft tokens that a cycle accepts.
    """

    tokens: int
    nodes: float
    fewest_cycles: float
    cycles: Array
    seconds: Array
    cycles_by_length: Array


def describe_totals(batches: int, lengths: int) -> np.dtype[np.void]:
    """Make the dtype of a table of `TextTotals`; all fields are float64.

    batches: number of batch sizes. lengths: number of cycle lengths.
    """
    batch_columns = np.dtype([("cycles", np.float64), ("seconds", np.float64)])
    return np.dtype(
        [
            ("tokens", np.float64),
            ("nodes", np.float64),
            ("fewest_cycles", np.float64),
            ("of_batch", batch_columns, (batches,)),
            ("cycles_by_length", np.float64, (lengths,)),
        ]
    )


def tabulate_totals(texts: Sequence[Sequence[TextTotals]]) -> TotalsTable:
    """Make the table [texts, pairs] of totals; its entries for lengths that a pair's cycles cannot have are 0."""
    # 1. The number of lengths: the tokens of the longest cycle.
    lengths = 0
    for pairs in texts:
        for totals in pairs:
            lengths = max(lengths, len(totals.cycles_by_length))
    columns = describe_totals(len(texts[0][0].cycles), lengths)

    # 2. The table, text by text.
    table = np.zeros((len(texts), len(texts[0])), columns)
    for row, pairs in zip(table, texts, strict=True):
        for i, totals in enumerate(pairs):
            row["tokens"][i] = totals.tokens
            row["nodes"][i] = totals.nodes
            row["fewest_cycles"][i] = totals.fewest_cycles
            row["of_batch"]["cycles"][i] = totals.cycles
            row["of_batch"]["seconds"][i] = totals.seconds
            row["cycles_by_length"][i, : len(totals.cycles_by_length)] = totals.cycles_by_length
    return table


def sum_and_leave_out(table: TotalsTable, groups: Array) -> TotalsTable:
    """Sum the totals over all groups of texts, then over all groups but each one; [1 + G, pairs].

    groups: [texts] the group of each text.
    """
    # 1. The table as numbers: the row of a text has the fields of all pairs.
    columns = table.dtype
    numbers = table.view(np.float64)  # [texts, pairs * fields]

    # 2. The totals of each group, then with `leave_one_out` those of all groups and without each group.
    _, group_of_text = np.unique(groups, return_inverse=True)
    group_totals = np.zeros((group_of_text.max() + 1, numbers.shape[1]))
    np.add.at(group_totals, group_of_text, numbers)
    resampled = np.tensordot(leave_one_out(len(group_totals)), group_totals, 1)
    return resampled.view(columns)


def build_tau_rows(
    pairs: Sequence[MeasuredPair], temperature: float, groups: Array, table: TotalsTable
) -> list[TauRow]:
    """Make the rows of one temperature, a row for each pair.

    Args:
        pairs: the measured pairs.
        temperature: temperature of the texts.
        groups: [texts] the question or conversation that each text belongs to.
        table: [texts, pairs] of `tabulate_totals`.

    Returns:
        The rows. Their figures have intervals over groups:

        - questions: number of groups.
        - tau: tokens per cycle.
        - bound: the largest tau that any lossless verifier of the pair's draws can have; None if unknown.
        - draws: how the draws are made; None if the tree has no fixed shape.
        - answers: answers that the verifier wrote to each prompt itself; 0: its figures follow the given texts.
        - ratio: tau relative to the first pair's.
        - nodes: mean size of a cycle's tree.
        - speed: batch size -> tokens a second by the cost model, and relative to one-token decoding.
        - alpha: acceptance rate at depth 1, 2, …
        - lengths: shares of the cycles of 1, 2, … tokens.
    """
    totals = sum_and_leave_out(table, groups)
    rows = []
    with np.errstate(divide="ignore", invalid="ignore"):  # one group: nothing is left without it
        for i, measured in enumerate(pairs):
            rows.append(make_tau_row(measured, temperature, totals[:, i], totals[:, 0]))
    return rows


def make_tau_row(
    measured: MeasuredPair, temperature: float, totals: TotalsTable, first_totals: TotalsTable
) -> TauRow:
    """Make a pair's row of `build_tau_rows`.

    totals: [1 + G] the pair's totals. first_totals: [1 + G] those of the first pair, for the ratio.
    """
    # 1. Tokens per cycle.
    pair = measured.pair
    cycles = totals["of_batch"]["cycles"][:, 0]
    tau = totals["tokens"] / cycles
    first_tau = first_totals["tokens"] / first_totals["of_batch"]["cycles"][:, 0]
    bound = None
    draws = None
    if pair.fixed:
        draws = pair.fixed.name_draws(not temperature)
        if draws is not None and not np.isnan(totals["fewest_cycles"][0]):
            bound = compute_interval(totals["tokens"] / totals["fewest_cycles"])

    # 2. The cycles by length, up to the tree's depth.
    counts = totals["cycles_by_length"]
    if pair.fixed:
        depth = pair.fixed.tree.max_depth
    else:
        depth = int(counts[0].nonzero()[0].max(initial=0))
    counts = counts[:, : 1 + depth]
    at_least = counts[:, ::-1].cumsum(1)[:, ::-1]  # cycles of 1, 2, … tokens or more
    alpha = []
    for reached, accepted in pairwise(at_least.T):
        alpha.append(compute_interval(accepted / reached, most=1.0))

    # 3. The row.
    return {
        "temperature": temperature,
        "drafter": measured.drafter,
        "tree": pair.shape,
        "verifier": pair.verifier,
        "questions": len(totals) - 1,
        "tau": compute_interval(tau),
        "bound": bound,
        "draws": draws,
        "answers": pair.answers,
        "ratio": compute_interval(tau / first_tau),
        "nodes": float(totals["nodes"][0] / cycles[0]),
        "speed": predict_speeds(measured.costs, totals),
        "alpha": alpha,
        "lengths": (counts[0] / counts[0].sum()).tolist(),
    }


def predict_speeds(costs: Costs, totals: TotalsTable) -> dict[int, dict[str, Figure]]:
    """Predict tokens a second by the cost model, and relative to one-token decoding, for each batch size."""
    speeds = {}
    for index, (batch, cost) in enumerate(costs.items()):
        rate = totals["tokens"] / totals["of_batch"]["seconds"][:, index]
        speeds[batch] = {
            "tokens": compute_interval(batch * rate),
            "over_one": compute_interval(rate / cost.baseline_speed),
        }
    return speeds
