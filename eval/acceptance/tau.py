"""Run `treespec tau`: compute τ exactly, from the expected number of cycles for given texts of the target.

A lossless decoder's text has the target's distribution, whatever its drafter and verifier. So one set of the target's
own answers serves all of them. Let w_t(l) be the probability that a cycle that begins after y_t emits
y_(t+1) … y_(t+l), divided by the target's probability of these tokens. Given the text, such a cycle ends after y_(t+l)
with probability w_t(l), and cycles end there u_(t+l) times on average:

    text        y1   y2   y3   y4            u_0 = 1
    w_0         .4   .5   .1                 u_1 = .4
    w_1              .7   .3                 u_2 = .5 + .4 · .7 = .78
    cycles      u_0 + u_1 + u_2 + u_3        τ = tokens / cycles

This is the average of decoding over its draws and coins. A tree of fixed shape needs only the draft's distributions
along the text, and no forward over a tree (`path_probability`). So does the bound: the largest τ that any lossless
verifier of the same draws can have (`drafted`). A `ddtree` of draws has a fixed shape after each token (`planned`).
Trees of other shapes are drafted along the text by the real loop (`decoded`). A verifier of another package that
judges whole trees writes answers of its own, whose cycles are counted (`simulated`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps
from treespec.errors import InputError
from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.acceptance.decoded import (
    Decoded,
    Simulated,
    build_roofline_cost,
    predict_cycle_seconds,
)
from treespec.eval.acceptance.drafted import DraftedTexts
from treespec.eval.acceptance.path_probability import Pair, follow_pairs
from treespec.eval.acceptance.planned import Planned, follow_planned
from treespec.eval.acceptance.simulated import simulate_totals
from treespec.eval.acceptance.table import build_tau_page
from treespec.eval.acceptance.tau_pairs import Costs, Measured, MeasuredPair, list_pairs
from treespec.eval.acceptance.tau_rows import TauRow, TextTotals, build_tau_rows, tabulate_totals
from treespec.eval.acceptance.teacher_forced import iterate_levels, predict_levels
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.header import get_today
from treespec.eval.intervals import Array
from treespec.eval.page import write_page
from treespec.eval.texts import Text, describe, load_or_write_texts, load_specs
from treespec.files.atomic import locked, write_json
from treespec.sampling.probs import SamplingParams


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter and the pairs to measure with it.

    Attributes:
        name: its name in the rows.
        spec: target and drafter.
        pairs: verifiers on trees.
        costs: batch size -> cost model of its cycles.
    """

    name: str
    spec: Spec
    pairs: Sequence[Measured]
    costs: Costs


def measure_tau(config: TauConfig, report: Report = ignore_report) -> dict[str, Any]:
    """Measure τ of every drafter, tree and verifier at every temperature, and write OUT/tau.json, .md and .html.

    Returns:
        The content of OUT/tau.json: config; environment; left_out, for each pair that is not measured the reason;
        rows (`treespec.eval.acceptance.tau_rows.build_tau_rows`).

    Raises:
        InputError: bad input.
    """
    # 1. The models and the pairs.
    out = Path(config.out)
    rows = list[TauRow]()
    pairs_by_drafter, left_out = list_pairs(config)
    with locked(out):
        names = [drafter.written for drafter in config.drafters]
        specs = load_specs(config, names, out / "tau.json", report)
        drafters = []
        for spec, pairs in zip(specs, pairs_by_drafter, strict=True):
            check_depths(spec, pairs)
        for drafter, spec, pairs in zip(config.drafters, specs, pairs_by_drafter, strict=True):
            drafters.append(MeasuredDrafter(drafter.short, spec, pairs, load_costs(spec, config)))

        # 2. Cycles and tokens, text by text.
        for temperature in config.temperatures:
            rows += measure_temperature(float(temperature), drafters, config, report)

        # 3. The files.
        result = {
            "config": asdict(config),
            "environment": describe(specs[0].target),
            "date": get_today(),
            "left_out": left_out,
            "rows": rows,
        }
        write_json(out / "tau.json", result)
        write_page(build_tau_page(result), out / "tau.html")
    return result


def check_depths(spec: Spec, pairs: Sequence[Measured]) -> None:
    """Raise InputError if a tree is deeper than the spec's head can draft."""
    deepest = 0
    for pair in pairs:
        if pair.tree and not pair.tree.at_once:
            deepest = max(deepest, pair.tree.max_depth)
    if spec.head and draft_steps(spec.head, deepest) < deepest:
        raise InputError(
            f"--tree is {deepest} deep: {spec.head.max_depth} levels are the most with {spec.head.known_as}"
        )


def load_costs(spec: Spec, config: TauConfig) -> Costs:
    """Load the cost model of a drafter's cycles by batch size, for the processor in the options or this machine."""
    cost_at = spec.times
    if config.bandwidth and config.flops:
        cost_at = build_roofline_cost(spec, config.bandwidth * 1e9, config.flops * 1e12)
    return {batch: cost_at(batch) for batch in config.batches}


def measure_temperature(
    temperature: float, drafters: Sequence[MeasuredDrafter], config: TauConfig, report: Report
) -> list[TauRow]:
    """Measure all drafters' pairs on the target's texts of one temperature; a row for each pair."""
    # 1. The totals of each text, pair by pair.
    params = SamplingParams(temperature, config.top_k, config.top_p)
    texts = load_or_write_texts(config, params, drafters[0].spec, report)
    totals_by_text = []
    for done, text in enumerate(texts):
        report(ProgressStep(done, len(texts), f"cycles at temperature {temperature:g}"))
        text_totals = []
        for drafter in drafters:
            text_totals += sum_text_totals(text, drafter, params, config)
        totals_by_text.append(text_totals)

    # 2. Ratios of the totals over all texts.
    pairs = []
    for drafter in drafters:
        for pair in drafter.pairs:
            pairs.append(MeasuredPair(drafter.name, pair, drafter.costs))
    groups = np.array([text.group for text in texts])
    return build_tau_rows(pairs, temperature, groups, tabulate_totals(totals_by_text))


@torch.no_grad()
def sum_text_totals(
    text: Text, drafter: MeasuredDrafter, params: SamplingParams, config: TauConfig
) -> list[TextTotals]:
    """Compute the expected cycles of decoding a text, with their nodes and seconds, for each of a drafter's pairs."""
    seed = config.seed + text.group
    fixed_pairs = [pair for pair in drafter.pairs if isinstance(pair, Pair)]
    fixed_totals = iter(compute_fixed_totals(text, drafter, fixed_pairs, params, config))
    pairs = [choose_way_to_measure(pair, params) for pair in drafter.pairs]
    planned_pairs = [pair for pair in pairs if isinstance(pair, Planned)]
    planned_totals = iter(compute_planned_totals(text, drafter, planned_pairs, params, config))
    decoded_totals: dict[Decoded, TextTotals] = {}
    totals = []
    for pair in pairs:
        if isinstance(pair, Pair):
            totals.append(next(fixed_totals))
        elif isinstance(pair, Planned):
            totals.append(next(planned_totals))
        elif isinstance(pair, Simulated):
            totals.append(simulate_totals(text, drafter.spec, drafter.costs, pair, params, config))
        else:
            if pair not in decoded_totals:
                decoded_totals[pair] = decode_and_count(text, drafter, pair, params, seed)
            totals.append(decoded_totals[pair])
    return totals


def choose_way_to_measure(pair: Measured, params: SamplingParams) -> Measured:
    """Choose how to measure a pair: a planned tree has the most likely tokens at temperature 0, whatever verifies."""
    if not params.greedy:
        return pair
    if isinstance(pair, Planned) or (isinstance(pair, Decoded) and pair.verifier == "gumbel"):
        return Decoded("topk", pair.shape, pair.tree)
    return pair


def compute_fixed_totals(
    text: Text,
    drafter: MeasuredDrafter,
    pairs: Sequence[Pair],
    params: SamplingParams,
    config: TauConfig,
) -> list[TextTotals]:
    """Compute the expected cycles of pairs whose trees have a fixed shape; draws and coins are integrated out.

    Args:
        text: a text of the target.
        drafter: has the head that drafts the trees, and the costs.
        pairs: the drafter's pairs whose trees have a fixed shape.
        params: temperature and truncation of text and drafts.
        config: has the seed and the number of samples, for schemes without a closed form.

    Returns:
        The totals of each pair.
    """
    if not pairs:
        return []

    # 1. How far each pair's cycles follow the text.
    depth = max(pair.tree.max_depth for pair in pairs)
    drafted_texts = DraftedTexts(pairs, params.greedy)

    def list_steps() -> Iterator[tuple[Nodes, Nodes]]:
        for drawn, scored in iterate_levels(drafter.spec, text, depth, params, config):
            drafted_texts.add_level(drawn, scored)
            yield drawn, scored

    kept_by_pair = follow_pairs(pairs, list_steps(), params.greedy)

    # 2. Its expected cycles, by the recurrence of the module's docstring.
    totals = []
    for pair, r in zip(pairs, kept_by_pair, strict=True):
        w = (r - pad(r[:, 1:], (0, 1))).numpy()
        u = count_cycle_starts(w)
        cycles = u.sum()
        starts_before_end = max(0, text.count - pair.tree.max_depth)
        seconds = cycles * pair.predict_cycle_seconds(drafter.costs)
        pair_totals = TextTotals(
            tokens=text.count,
            nodes=pair.tree.size * cycles,
            fewest_cycles=drafted_texts.count_fewest(pair),
            cycles=np.full(len(seconds), cycles),
            seconds=seconds,
            cycles_by_length=u[:starts_before_end] @ w[:starts_before_end],
        )
        totals.append(pair_totals)
    return totals


def compute_planned_totals(
    text: Text,
    drafter: MeasuredDrafter,
    pairs: Sequence[Planned],
    params: SamplingParams,
    config: TauConfig,
) -> Iterator[TextTotals]:
    """Compute the totals of pairs whose trees the draft's levels fix before anything is drawn.

    Arguments as for `compute_fixed_totals`. The temperature is above 0.
    """
    if not pairs:
        return

    # 1. Both models along the text.
    head = drafter.spec.head
    assert head
    depth = draft_steps(head, max(pair.tree.max_depth for pair in pairs))
    levels = list(predict_levels(drafter.spec, text, depth, params))
    steps = list(iterate_levels(drafter.spec, text, depth, params, config))

    # 2. The cycles of each pair.
    for pair in pairs:
        cycles = follow_planned(pair, pair.plan_trees(levels, params), steps)
        w = (cycles.kept - pad(cycles.kept[:, 1:], (0, 1))).numpy()
        u = count_cycle_starts(w)
        seconds = cycles.predict_seconds(drafter.costs) @ u
        starts_before_end = max(0, text.count - depth)
        yield TextTotals(
            tokens=text.count,
            nodes=float(cycles.sizes @ u),
            fewest_cycles=np.nan,
            cycles=np.full(len(seconds), u.sum()),
            seconds=seconds,
            cycles_by_length=u[:starts_before_end] @ w[:starts_before_end],
        )


def decode_and_count(
    text: Text, drafter: MeasuredDrafter, pair: Decoded, params: SamplingParams, seed: int
) -> TextTotals:
    """Count the cycles of a pair whose tree has another shape each cycle, by the real decoding loop.

    Args:
        text: the text to decode along.
        drafter: drafts the trees.
        pair: one of its pairs.
        params: temperature and truncation of the text.
        seed: the seed that the text was written with; under Gumbel noise it writes the text again.
    """
    # 1. The cycles at each batch size, since trees may be chosen by its cost.
    costs = drafter.costs.values()
    cycles_by_cost = [pair.decode_cycles(drafter.spec, cost, text, params, seed) for cost in costs]
    seconds = []
    for cost, cycles in zip(costs, cycles_by_cost, strict=True):
        seconds.append(sum(predict_cycle_seconds(cycle, cost) for cycle in cycles))

    # 2. The nodes and lengths of the cycles at the first batch size.
    first_cycles = cycles_by_cost[0]
    drafted_tokens = [cycle.new_tokens - 1 for cycle in first_cycles[:-1]]
    return TextTotals(
        tokens=text.count,
        nodes=sum(len(cycle.parents) for cycle in first_cycles),
        fewest_cycles=np.nan,
        cycles=np.array([len(cycles) for cycles in cycles_by_cost]),
        seconds=np.array(seconds),
        cycles_by_length=np.bincount(drafted_tokens, minlength=1).astype(np.float64),
    )


def count_cycle_starts(w: Array) -> Array:
    """Count how often, on average, a cycle begins after each token of a text: u [n].

    w: [n, D + 1] the probability that a cycle that begins there emits the next 1 … D + 1 tokens.
    """
    n, longest = w.shape
    u = np.zeros(n + longest)
    u[0] = 1
    for t in range(n):
        u[t + 1 : t + 1 + longest] += u[t] * w[t]
    return u[:n]
