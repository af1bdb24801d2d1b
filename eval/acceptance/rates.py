"""Run `treespec acceptance`: measure schemes' acceptance rates at collected positions, and the optimal rates α*."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.config import (
    AcceptanceConfig,
    Case,
    explain_no_rate,
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
from treespec.eval.acceptance.table import Row, build_acceptance_page
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.header import get_today
from treespec.eval.intervals import Figure, Z, compute_t_quantile
from treespec.eval.page import write_page
from treespec.files.atomic import locked, write_json
from treespec.files.distribution import find_version
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.verify.rates import bound_optimum, find_optimum, measure_rate
from treespec.verify.registry import load_verifier
from treespec.verify.scheme import Scheme
from treespec.verify.walk import is_walk

MAX_TENSOR_ELEMENTS = 1 << 24  # largest number of elements of a [rows, V] tensor: 64 MiB in float32

RateKey = tuple[str | None, str]  # (name of a scheme, or None for α*; how the draws are made)
# [2, n] rates and their Monte-Carlo errors; the errors are 0 if the rates have a closed form
Rates = dict[RateKey, Tensor]


def accept(config: AcceptanceConfig, report: Report = ignore_report) -> dict[str, Any]:
    """Collect logits or load published distributions, measure every scheme's rate, and write OUT/acceptance.*.

    Returns:
        The content of OUT/acceptance.json: config; environment; left_out, for each scheme that does not fit the
        reason; left_out_draws, the numbers of draws where it does not; sweeps, the rows of each sweep
        (`build_rate_rows`).

    Raises:
        InputError: bad input.
    """
    # 1. The cases, and the logits of p and q.
    cases = []
    for sweep in list_sweeps(config):
        for case in list_cases(sweep):
            names = parse_schemes(sweep.verifier)
            cases.append((sweep, case, {name: load_rated_scheme(name) for name in names}))
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
        left_out_draws: dict[str, list[int]] = defaultdict(list)
        tables: dict[AcceptanceConfig, list[Row]] = defaultdict(list)
        for done, (sweep, case, schemes) in enumerate(cases):
            text = f"rates at temperature {case.temperature:g} of {case.draws} draws"
            report(ProgressStep(done, len(cases), text))
            case_rates, refusals = compute_scheme_rates(logits, sweep, case, schemes, generator)
            left_out = refusals | left_out
            for name in refusals:
                if case.draws not in left_out_draws[name]:
                    left_out_draws[name].append(case.draws)
            if not case_rates:
                raise InputError("; ".join(refusals.values()))
            tables[sweep] += build_rate_rows(case_rates, case, logits)

        # 3. The files.
        environment |= {"treespec": find_version(), "rates on": str(generator.device)}
        result = {
            "config": asdict(config),
            "environment": environment,
            "date": get_today(),
            "left_out": left_out,
            "left_out_draws": dict(left_out_draws),
            "sweeps": list(tables.values()),
        }
        out = Path(config.out)
        write_json(out / "acceptance.json", result)
        write_page(build_acceptance_page(result), out / "acceptance.html")
    return result


def load_rated_scheme(name: str) -> Scheme:
    """Load the scheme that a verifier walks over. Raises InputError for a verifier of whole trees."""
    verifier = load_verifier(name)
    if not is_walk(verifier) or verifier.coupled:
        raise InputError(explain_no_rate(name))
    return verifier.scheme


def compute_scheme_rates(
    logits: Logits,
    sweep: AcceptanceConfig,
    case: Case,
    schemes: Mapping[str, Scheme],
    generator: torch.Generator,
) -> tuple[Rates, dict[str, str]]:
    """Measure every scheme at every position, and the α* of the schemes' draws.

    Args:
        logits: logits of target and draft at n positions.
        sweep: has the truncation of both distributions, and the number of Monte-Carlo samples.
        case: temperatures, and the number of draws at a node.
        schemes: name in `--verifier` -> scheme.
        generator: draws tokens and coins; the rates are computed on its device.

    Returns:
        The rates, grouped by how the schemes draw: in each group the schemes, then their α*, or a bound of it for a
        scheme that does not say how it draws. And the reason for each scheme that was left out, by its name.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks: dict[Any, list[Tensor]] = defaultdict(list)  # [2, rows] each
    refusals: dict[str, str] = {}
    chunk_rows = max(1, MAX_TENSOR_ELEMENTS // logits.p.shape[1])
    params = SamplingParams(case.temperature, sweep.top_k, sweep.top_p)
    draft_params = params
    if case.draft != "same":
        draft_params = SamplingParams(float(case.draft), sweep.top_k, sweep.top_p)
    for p_logits, q_logits in zip(
        logits.p.split(chunk_rows), logits.q.split(chunk_rows), strict=True
    ):
        p = compute_probs(p_logits.to(generator.device), params)  # [B, V]
        q = compute_probs(q_logits.to(generator.device), draft_params)  # [B, V]

        # 2. The schemes, and α* of their draws.
        rated_schemes = dict[str, Scheme]()
        for name, scheme in schemes.items():
            try:
                rates_and_errors = measure_rate(scheme, p, q, case.draws, generator, sweep.samples)
            except InputError as error:
                refusals[name] = str(error).partition(";")[0]
            else:
                kind = name_draws(name, scheme)
                rated_schemes.setdefault(kind, scheme)
                chunks[name, kind].append(rates_and_errors.cpu())
        for kind, scheme in rated_schemes.items():
            optimum = measure_optimum(scheme, p, q, case.draws, generator, sweep.samples)
            chunks[None, kind].append(optimum.cpu())

    # 3. All positions; a scheme refused in one chunk is left out everywhere.
    rates: Rates = {}
    for key, parts in chunks.items():
        scheme_name, _ = key
        if scheme_name not in refusals:
            rates[key] = torch.cat(parts, dim=1)
    return {key: rates[key] for key in order_by_draws(rates)}, refusals


def order_by_draws(rates: Rates) -> list[RateKey]:
    """Order the keys of rates as `compute_scheme_rates` returns them."""
    kinds: list[str] = []
    for _, kind in rates:
        if kind not in kinds:
            kinds.append(kind)

    def rank(key: RateKey) -> tuple[int, bool]:
        scheme_name, kind = key
        return kinds.index(kind), scheme_name is None

    return sorted(rates, key=rank)


def name_draws(name: str, scheme: Scheme) -> str:
    """Name how a scheme draws; a scheme that does not say so has a kind of its own, whose α* is bounded."""
    if scheme.drawing is None:
        return f"of the draws of {name}, at most"
    return scheme.drawing


def measure_optimum(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, generator: torch.Generator, samples: int
) -> Tensor:
    """Compute α* of a scheme's draws and its Monte-Carlo error [2, B], or a bound of α* if no formula states it."""
    optimum = find_optimum(scheme, p, q, k)
    if optimum is None:
        return bound_optimum(scheme, p, q, k, generator, samples)
    return torch.stack([optimum, torch.zeros_like(optimum)])


def build_rate_rows(rates: Rates, case: Case, logits: Logits) -> Iterator[Row]:
    """Yield a row for each method; with published distributions, for each pair of distributions and each method.

    A row has the fields:

        at                   temperature, draft (its temperature), draws; the names of a published pair of distributions
        method               a scheme, or α* with how its draws are made
        positions, groups    their numbers; a group is a question or text
        rate                 α or α*. Its interval is over groups, and at least as wide as `noise` makes it
        noise                Monte-Carlo error of the rate; None if it has a closed form
        gap                  α* - α of the same draws
    """
    # 1. The coordinates of the rows, with the positions [m] of each.
    coordinates: Coordinates = {
        "temperature": case.temperature,
        "draft": case.draft,
        "draws": case.draws,
    }
    all_positions = torch.arange(len(logits.group), device="cpu")
    parts = [(coordinates, all_positions)]
    if logits.names:
        parts = []
        for i, name in enumerate(logits.names):
            parts.append((name | coordinates, all_positions[i : i + 1]))

    # 2. A row for each method, with the gap to the α* of its draws.
    for at, positions in parts:
        group = logits.group[positions]
        for (method, drawing), (values, errors) in rates.items():
            noise: float | None = float(errors[positions].square().sum().sqrt()) / len(positions)
            if noise == 0:  # the rate has a closed form
                noise = None
            gap = None
            if method:
                optimum_rates, _ = rates[None, drawing]
                gap = average((optimum_rates - values)[positions], group, noise)
            yield {
                "at": at,
                "method": method or f"α* {drawing}",
                "positions": len(positions),
                "groups": len(group.unique()),
                "rate": average(values[positions], group, noise),
                "noise": noise,
                "gap": gap,
            }


def average(values: Tensor, group: Tensor, noise: float | None = None) -> Figure:
    """Compute the mean over positions with a 95 % interval; no interval if there is only one group and no noise.

    Groups differ in size, so the mean is a ratio of totals over groups. Its error follows by linearisation:
    sqrt(G / (G - 1) · Σ_g (Σ_{i in g} (x_i - mean))²) / n, with Student's t of G - 1 degrees of freedom.

    Args:
        values: [n].
        group: [n] int64, the group of each position.
        noise: Monte-Carlo error of the mean; None: no error. The groups' spread includes it, but the spread of a few
            groups may be smaller by chance: the interval is the wider one of both.
    """
    values = values.double()
    mean = float(values.mean())
    groups = len(group.unique())
    half_widths = []
    if noise is not None:
        half_widths.append(Z * noise)
    if groups > 1:
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device="cpu")
        squares = sums.index_add_(0, group, values - mean).square().sum()
        error = float((squares * groups / (groups - 1)).sqrt()) / len(values)
        half_widths.append(compute_t_quantile(groups - 1) * error)
    if not half_widths:
        return {"value": mean, "low": None, "high": None}
    half_width = max(half_widths)
    return {"value": mean, "low": mean - half_width, "high": mean + half_width}
