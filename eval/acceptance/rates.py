"""The acceptance lab: the acceptance rates of schemes at collected positions, and the largest possible ones."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.config import (
    AcceptanceConfig,
    Case,
    list_cases,
    list_sweeps,
    parse_schemes,
)
from treespec.eval.acceptance.sources import (
    Coordinates,
    Logits,
    collect_logits,
    load_published_distributions,
)
from treespec.eval.acceptance.table import Row, build_acceptance_report
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.intervals import Figure, Z, compute_t_quantile
from treespec.eval.report import render_markdown, render_page
from treespec.files.atomic import locked, write_json, write_text
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.verify.rates import find_optimum, measure_rate
from treespec.verify.registry import load_scheme
from treespec.verify.scheme import Scheme

MAX_TENSOR_ELEMENTS = 1 << 24  # most elements of a [rows, V] tensor: 64 MiB in float32

# The name of a scheme, or None for α*; and how its draws are made, None if α* of that is not known
RateKey = tuple[str | None, str | None]
# [2, n] rates and their Monte-Carlo errors, which are 0 where a formula states the rates
Rates = dict[RateKey, Tensor]


def accept(config: AcceptanceConfig, report: Report = ignore_report) -> dict[str, Any]:
    """Collect logits, or take the given distributions, then rate every scheme.

    Writes and returns OUT/acceptance.json; also writes OUT/acceptance.md and .html. Its fields:
    config, environment; left_out: why each scheme that is missing does not fit; sweeps: the rows of
    each sweep. Raises InputError for bad input.
    """
    # 1. What is compared, and where p and q come from.
    planned = []
    for sweep in list_sweeps(config):
        for case in list_cases(sweep):
            planned.append((sweep, case, parse_schemes(sweep.verifier)))
    with locked(config.out):
        if config.given:
            logits, environment = load_published_distributions()
        else:
            logits, environment = collect_logits(config, report)

        # 2. The rates of every case.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device)
        generator.manual_seed(config.seed)
        left_out: dict[str, str] = {}
        tables: dict[AcceptanceConfig, list[Row]] = defaultdict(list)
        for done, (sweep, case, names) in enumerate(planned):
            text = f"rates at temperature {case.temperature:g} of {case.draws} draws"
            report(ProgressStep(done, len(planned), text))
            schemes = {name: load_scheme(name) for name in names}
            rated, refused = compute_scheme_rates(logits, sweep, case, schemes, generator)
            left_out = refused | left_out
            if not rated:
                raise InputError("; ".join(refused.values()))
            tables[sweep] += build_rate_rows(rated, case, logits)

        # 3. The files.
        environment |= {"treespec": version("treespec"), "rates on": str(generator.device)}
        result = {
            "config": asdict(config),
            "environment": environment,
            "left_out": left_out,
            "sweeps": list(tables.values()),
        }
        out = Path(config.out)
        tables_and_notes = build_acceptance_report(result)
        write_json(out / "acceptance.json", result)
        write_text(out / "acceptance.md", render_markdown(tables_and_notes))
        write_text(out / "acceptance.html", render_page(tables_and_notes, "Acceptance rates"))
    return result


def compute_scheme_rates(
    logits: Logits,
    sweep: AcceptanceConfig,
    case: Case,
    schemes: Mapping[str, Scheme],
    generator: torch.Generator,
) -> tuple[Rates, dict[str, str]]:
    """Measure every scheme at every position, and the α* of the schemes' draws.

    Args:
        logits: of target and draft, at n positions.
        sweep: truncation of both distributions, and the number of Monte-Carlo samples.
        case: temperatures, and the number of draws at a node.
        schemes: by the name in `--verifier`.
        generator: of draws and coins; its device computes.

    Returns:
        The rates, ordered by how the schemes draw, α* after its schemes, and last the schemes whose α* is not known;
        and why other schemes were left out, by name.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks: dict[Any, list[Tensor]] = defaultdict(list)  # [2, rows] each
    refused: dict[str, str] = {}
    rows = max(1, MAX_TENSOR_ELEMENTS // logits.p.shape[1])
    params = SamplingParams(case.temperature, sweep.top_k, sweep.top_p)
    draft_params = params
    if case.draft != "same":
        draft_params = SamplingParams(float(case.draft), sweep.top_k, sweep.top_p)
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        p = compute_probs(p_logits.to(generator.device), params)  # [B, V]
        q = compute_probs(q_logits.to(generator.device), draft_params)  # [B, V]

        # 2. The schemes, and α* of their draws.
        rated_schemes = list[Scheme]()
        for name, scheme in schemes.items():
            try:
                rates_and_errors = measure_rate(scheme, p, q, case.draws, generator, sweep.samples)
            except InputError as error:
                refused[name] = str(error).partition(";")[0]
            else:
                rated_schemes.append(scheme)
                chunks[name, scheme.drawing].append(rates_and_errors.cpu())
        for kind, values in find_optima(rated_schemes, p, q, case.draws).items():
            chunks[None, kind].append(torch.stack([values, torch.zeros_like(values)]).cpu())

    # 3. All positions; a scheme refused in one chunk is left out everywhere.
    rated: Rates = {}
    for key, parts in chunks.items():
        scheme_name, _ = key
        if scheme_name not in refused:
            rated[key] = torch.cat(parts, dim=1)
    return {key: rated[key] for key in order_by_draws(rated)}, refused


def order_by_draws(rated: Rates) -> list[RateKey]:
    """Order the keys of rates as `compute_scheme_rates` returns them."""
    kinds: list[str | None] = []
    for _, kind in rated:
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    kinds.append(None)  # schemes whose α* is not known

    def rank(key: RateKey) -> tuple[int, bool]:
        scheme_name, kind = key
        return kinds.index(kind), scheme_name is None

    return sorted(rated, key=rank)


def find_optima(schemes: Iterable[Scheme], p: Tensor, q: Tensor, k: int) -> dict[str, Tensor]:
    """[B] α* of the draws of each scheme where it is known, by how they are made. p, q: [B, V]."""
    optima = dict[str, Tensor]()
    for scheme in schemes:
        kind = scheme.drawing
        if kind is None or kind in optima:
            continue
        optimum = find_optimum(scheme, p, q, k)
        if optimum is not None:
            optima[kind] = optimum
    return optima


def build_rate_rows(rated: Rates, case: Case, logits: Logits) -> Iterator[Row]:
    """Make a row for each method; with given distributions, for each pair of them and method.

    at: temperature, draft (its temperature), draws and, for given distributions, which. method: of
    α* with how the draws are made. positions, groups: their numbers; a group is a question or text.
    rate: α or α*; its interval is over positions, by group, and at least as wide as `noise` makes
    it: the Monte-Carlo error of a rate that no formula states. gap: α* - α of the same draws.
    """
    # 1. The coordinates, and the positions [m] of each.
    coordinates: Coordinates = {
        "temperature": case.temperature,
        "draft": case.draft,
        "draws": case.draws,
    }
    all_positions = torch.arange(len(logits.group))
    parts = [(coordinates, all_positions)]
    if logits.names:
        parts = []
        for i, name in enumerate(logits.names):
            parts.append((name | coordinates, all_positions[i : i + 1]))

    # 2. Each method there, beside the α* of its draws.
    for at, positions in parts:
        group = logits.group[positions]
        for (method, drawn), (values, errors) in rated.items():
            noise: float | None = float(errors[positions].square().sum().sqrt()) / len(positions)
            if noise == 0:  # a formula states the rate
                noise = None
            optimum = rated.get((None, drawn))
            gap = None
            if method and optimum is not None:
                optimum_rates, _ = optimum
                gap = average((optimum_rates - values)[positions], group, noise)
            yield {
                "at": at,
                "method": method or f"α* {drawn}",
                "positions": len(positions),
                "groups": len(group.unique()),
                "rate": average(values[positions], group, noise),
                "noise": noise,
                "gap": gap,
            }


def average(values: Tensor, group: Tensor, noise: float | None = None) -> Figure:
    """The mean over positions and its 95 % interval; without ends if only one group is there, and no noise.

    values: [n]. group: [n] int64; groups differ in size, so the mean is a ratio of totals over
    groups, and its error follows by linearisation: sqrt(G / (G - 1) · Σ_g (Σ_{i in g} (x_i -
    mean))²) / n, with Student's t of G - 1 degrees of freedom. noise: the Monte-Carlo error of the mean.
    The groups' spread holds it already, but a few groups may show less: the interval is never inside its own.
    """
    values = values.double()
    mean = float(values.mean())
    groups = len(group.unique())
    reaches = []
    if noise is not None:
        reaches.append(Z * noise)
    if groups > 1:
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
        squares = sums.index_add_(0, group, values - mean).square().sum()
        spread = float((squares * groups / (groups - 1)).sqrt()) / len(values)
        reaches.append(compute_t_quantile(groups - 1) * spread)
    if not reaches:
        return {"value": mean, "low": None, "high": None}
    reach = max(reaches)
    return {"value": mean, "low": mean - reach, "high": mean + reach}
