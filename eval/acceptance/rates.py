"""The acceptance lab: what schemes accept of a draft at collected positions, and what any could accept."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig, Case, cases, schemes_in, sweeps
from treespec.eval.acceptance.sources import Logits, collected, given
from treespec.eval.acceptance.table import Row, report_of
from treespec.eval.common import Report, Step, silent
from treespec.eval.intervals import Figure, Z, compute_t_quantile
from treespec.eval.report import markdown, page
from treespec.files.atomic import locked, write_json, write_text
from treespec.sampling.probs import SamplingParams, probs
from treespec.verify.rates import find_optimum, measured
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme

ELEMENTS = 1 << 24  # most elements of a [rows, V] tensor: 64 MiB in float32

# [2, n] rates and their Monte-Carlo errors, 0 where a formula states them, by the name of the scheme
# or None for α*, and how its draws are made, None where α* of that is not known
Rates = dict[tuple[str | None, str | None], Tensor]


def accept(config: AcceptanceConfig, report: Report = silent) -> dict[str, Any]:
    """Collect logits, or take the given distributions, then rate every scheme.

    Writes and returns OUT/acceptance.json; also writes OUT/acceptance.md and .html. Its fields:
    config, environment; left_out: why each scheme that is missing does not fit; sweeps: the rows of
    each sweep. Raises InputError for bad input.
    """
    # 1. What is compared, and where p and q come from.
    planned = [
        (sweep, case, schemes_in(sweep.verifier))
        for sweep in sweeps(config)
        for case in cases(sweep)
    ]
    with locked(config.out):
        logits, environment = given() if config.given else collected(config, report)

        # 2. The rates of every case.
        generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
        generator.manual_seed(config.seed)
        left_out: dict[str, str] = {}
        tables: dict[AcceptanceConfig, list[Row]] = defaultdict(list)
        for done, (sweep, case, names) in enumerate(planned):
            text = f"rates at temperature {case.temperature:g} of {case.draws} draws"
            report(Step(done, len(planned), text))
            schemes = {name: scheme_by_name(name) for name in names}
            rated, refused = rate(logits, sweep, case, schemes, generator)
            left_out = refused | left_out
            if not rated:
                raise InputError("; ".join(refused.values()))
            tables[sweep] += rows_of(rated, case, logits)

        # 3. The files.
        environment |= {"treespec": version("treespec"), "rates on": str(generator.device)}
        found = {"config": asdict(config), "environment": environment, "left_out": left_out}
        result = found | {"sweeps": [*tables.values()]}
        out = Path(config.out)
        shown = report_of(result)
        write_json(out / "acceptance.json", result)
        write_text(out / "acceptance.md", markdown(shown))
        write_text(out / "acceptance.html", page(shown, "Acceptance rates"))
    return result


def rate(
    logits: Logits,
    sweep: AcceptanceConfig,
    case: Case,
    schemes: Mapping[str, Scheme],
    generator: torch.Generator,
) -> tuple[Rates, dict[str, str]]:
    """(the rates of every scheme and the α* of their draws, why others were left out, by name).

    They are ordered by how they draw, α* after its schemes; last the schemes whose α* is not known.
    The generator's device computes.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks: dict[Any, list[Tensor]] = defaultdict(list)  # [2, rows] each
    refused: dict[str, str] = {}
    rows = max(1, ELEMENTS // logits.p.shape[1])
    heats = (case.temperature, case.temperature if case.draft == "same" else float(case.draft))
    params = [SamplingParams(heat, sweep.top_k, sweep.top_p) for heat in heats]
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        p, q = (  # [B, V]
            probs(own.to(generator.device), by)
            for own, by in zip((p_logits, q_logits), params, strict=True)
        )

        # 2. The schemes, and α* of their draws.
        rated_schemes = list[Scheme]()
        for name, scheme in schemes.items():
            try:
                found = measured(scheme, p, q, case.draws, generator, sweep.samples)
            except InputError as error:
                refused[name] = str(error).partition(";")[0]
            else:
                rated_schemes.append(scheme)
                chunks[name, scheme.drawing].append(found.cpu())
        for kind, values in find_optima(rated_schemes, p, q, case.draws).items():
            chunks[None, kind].append(torch.stack([values, torch.zeros_like(values)]).cpu())

    # 3. All positions; a scheme refused in one chunk is left out everywhere.
    rated = {key: torch.cat(own, dim=1) for key, own in chunks.items() if key[0] not in refused}
    return {key: rated[key] for key in order_by_draws(rated)}, refused


def order_by_draws(rated: Rates) -> list[tuple[str | None, str | None]]:
    """The keys of rates as `rate` orders them."""
    kinds = [*dict.fromkeys(kind for _, kind in rated if kind is not None), None]
    return sorted(rated, key=lambda key: (kinds.index(key[1]), key[0] is None))


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


def rows_of(rated: Rates, case: Case, logits: Logits) -> Iterator[Row]:
    """A row per method; with given distributions, a row per pair of them and method.

    at: temperature, draft (its temperature), draws and, for given distributions, which. method: of
    α* with how the draws are made. positions, groups: their numbers; a group is a question or text.
    rate: α or α*; its interval is over positions, by group, and at least as wide as `noise` makes
    it: the Monte-Carlo error of a rate that no formula states. gap: α* - α of the same draws.
    """
    # 1. The coordinates, and the positions [m] of each.
    here = {"temperature": case.temperature, "draft": case.draft, "draws": case.draws}
    every = torch.arange(len(logits.group))
    parts = [(name | here, every[i : i + 1]) for i, name in enumerate(logits.names)]

    # 2. Each method there, beside the α* of its draws.
    for at, positions in parts or [(here, every)]:
        group = logits.group[positions]
        for (method, drawn), (values, errors) in rated.items():
            noise = float(errors[positions].square().sum().sqrt()) / len(positions) or None
            best = rated.get((None, drawn))
            gap = None
            if method and best is not None:
                gap = average((best[0] - values)[positions], group, noise)
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
    """The mean over positions and its 95 % interval; none where one group shows no spread.

    values: [n]. group: [n] int64; groups differ in size, so the mean is a ratio of totals over
    groups, and its error follows by linearisation: sqrt(G / (G - 1) · Σ_g (Σ_{i in g} (x_i -
    mean))²) / n, with Student's t of G - 1 degrees of freedom. noise: the Monte-Carlo error of the mean.
    The groups' spread holds it already, but a few groups may show less: the interval is never inside its own.
    """
    values = values.double()
    mean = float(values.mean())
    groups = len(group.unique())
    reaches = [Z * noise] if noise is not None else []
    if groups > 1:
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
        squares = sums.index_add_(0, group, values - mean).square().sum()
        spread = float((squares * groups / (groups - 1)).sqrt()) / len(values)
        reaches.append(compute_t_quantile(groups - 1) * spread)
    if not reaches:
        return {"value": mean, "low": None, "high": None}
    reach = max(reaches)
    return {"value": mean, "low": mean - reach, "high": mean + reach}
