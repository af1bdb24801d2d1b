"""The acceptance lab: what schemes accept of a draft at collected positions, and what any could accept."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig, Case, cases, schemes_in, sweeps
from treespec.eval.acceptance.otm_lp import OtmLp
from treespec.eval.acceptance.sources import Coordinates, Logits, collected, given
from treespec.eval.acceptance.table import Mean, Row, report_of
from treespec.eval.common import Report, Step, silent
from treespec.eval.report import markdown, page
from treespec.files.atomic import locked, write_json, write_text
from treespec.shaping.sampling import SamplingParams, probs
from treespec.verify.facts import REFERENCE
from treespec.verify.rates import OPTIMA, measured
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme

ELEMENTS = 1 << 24  # most elements of a [rows, V] tensor: 64 MiB in float32


def accept(config: AcceptanceConfig, report: Report = silent) -> dict[str, Any]:
    """Collect logits, or take the given distributions, then rate every scheme.

    Writes and returns OUT/acceptance.json; also writes OUT/acceptance.md and .html. Its fields:
    config, environment; left_out: why each scheme that is missing does not fit; sweeps: the rows of
    each sweep. Raises InputError for bad input.
    """
    # 1. What is compared, and where p and q come from.
    schemes = {sweep: schemes_of(sweep.verifier) for sweep in sweeps(config)}
    planned = [(sweep, case) for sweep in schemes for case in cases(sweep)]
    known = given(config.given) if config.given else None
    with locked(config.out):
        names: list[Coordinates] = []
        if known:
            (logits, names), environment = known, dict[str, object](torch=str(torch.__version__))
        else:
            logits, environment = collected(config, report)

        # 2. The rates of every case.
        generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
        generator.manual_seed(config.seed)
        left_out: dict[str, str] = {}
        tables: dict[AcceptanceConfig, list[Row]] = {sweep: [] for sweep in schemes}
        for done, (sweep, case) in enumerate(planned):
            text = f"rates at temperature {case.temperature:g} of {case.draws} draws"
            report(Step(done, len(planned), text))
            rated, refused = rate(logits, case, schemes[sweep], sweep.samples, generator)
            left_out = refused | left_out
            if not rated:
                raise InputError("; ".join(refused.values()))
            tables[sweep] += rows_of(rated, case, logits.group, names)

        # 3. The files.
        environment |= {"treespec": version("treespec"), "rates on": str(generator.device)}
        found = {"config": asdict(config), "environment": environment, "left_out": left_out}
        result, out = found | {"sweeps": [*tables.values()]}, Path(config.out)
        shown = report_of(result)
        write_json(out / "acceptance.json", result)
        write_text(out / "acceptance.md", markdown(shown))
        write_text(out / "acceptance.html", page(shown, "Acceptance rates"))
    return result


def schemes_of(verifiers: str) -> dict[str, Scheme]:
    """The schemes that `--verifier` names, ordered by how they draw; `all`: every lossless one."""
    names = schemes_in(verifiers)
    schemes = {name: OtmLp() if name == REFERENCE else scheme_by_name(name) for name in names}
    order = [*OPTIMA, None]
    return dict(sorted(schemes.items(), key=lambda item: order.index(item[1].drawing)))


@dataclass(frozen=True)
class MethodRates:
    """The acceptance rates of one scheme, or α*, at n positions.

    method: the scheme's name, or for α* how its draws are made. drawn: how the draws are made,
    where α* of that is known. optimum: whether these rates are α*. values: [n] rates. errors: [n]
    their Monte-Carlo standard errors, 0 where a formula states them.
    """

    method: str
    drawn: str | None
    optimum: bool
    values: Tensor
    errors: Tensor


def rate(
    logits: Logits, case: Case, schemes: dict[str, Scheme], samples: int, generator: torch.Generator
) -> tuple[list[MethodRates], dict[str, str]]:
    """(the rates of every scheme and the α* of their draws, why others were left out, by name).

    The generator's device computes. samples: Monte-Carlo samples per position.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks = defaultdict[tuple[str, str | None, bool], list[Tensor]](list)  # [2, rows] each
    refused: dict[str, str] = {}
    rows = max(1, ELEMENTS // logits.p.shape[1])
    target, *of_draws = (
        SamplingParams(t, case.top_k, case.top_p)
        for t in (case.temperature, *case.draft_temperatures)
    )
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        p = probs(p_logits.to(generator.device), target)  # [B, V]
        q_of_draws = [probs(q_logits.to(generator.device), params) for params in of_draws]
        q = torch.stack(q_of_draws, dim=1) if len(q_of_draws) > 1 else q_of_draws[0]

        # 2. The schemes that take such draws, and α* of their draws; it is known for draws from one distribution.
        drawn = set()
        for name, scheme in schemes.items():
            try:
                found = measured(scheme, p, q, case.draws, generator, samples)
            except InputError as error:
                refused[name] = str(error).partition(";")[0]
            else:
                drawn.add(scheme.drawing)
                both = torch.stack([found.value, found.error]).cpu()
                chunks[name, scheme.drawing, False].append(both)
        for kind in (kind for kind in OPTIMA if kind in drawn and q.dim() == 2):
            values = OPTIMA[kind](p, q, case.draws).cpu()
            chunks[kind, kind, True].append(torch.stack([values, torch.zeros_like(values)]))

    # 3. All positions; a scheme refused in one chunk is left out everywhere.
    rated = [
        MethodRates(*method, *torch.cat(parts, dim=1))
        for method, parts in chunks.items()
        if method[0] not in refused
    ]
    return rated, refused


def rows_of(
    rated: list[MethodRates], case: Case, group: Tensor, names: Sequence[Coordinates]
) -> Iterator[Row]:
    """A row per method; with given distributions, a row per pair of them and method.

    at: temperature, draft (its temperature), draws and, for given distributions, which. method,
    optimum, drawn: as of `MethodRates`. positions, groups: their numbers; a group is a question or
    text. rate: α or α*; its error is over positions, by group, and at least `noise`: the
    Monte-Carlo error of a rate that no formula states. gap: α* - α of the same draws, with an error
    alike.

    group: [n] int64. names: what names each pair; (): all positions go together.
    """
    # 1. The coordinates, and the positions [m] of each.
    here: Coordinates = {"temperature": case.temperature, "draft": case.draft, "draws": case.draws}
    every = torch.arange(len(group))
    parts = [(name | here, every[i : i + 1]) for i, name in enumerate(names)] or [(here, every)]

    # 2. Each method there, beside the α* of its draws.
    optima = {rates.drawn: rates.values for rates in rated if rates.optimum}
    for at, positions in parts:
        groups = group[positions]
        for rates in rated:
            gap = None
            noise = float(rates.errors[positions].square().sum().sqrt()) / len(positions) or None
            if rates.drawn in optima and not rates.optimum:
                gap = average((optima[rates.drawn] - rates.values)[positions], groups, noise)
            yield {
                "at": at,
                "method": rates.method,
                "optimum": rates.optimum,
                "drawn": rates.drawn,
                "positions": len(positions),
                "groups": len(groups.unique()),
                "rate": average(rates.values[positions], groups, noise),
                "noise": noise,
                "gap": gap,
            }


def average(values: Tensor, group: Tensor, noise: float | None = None) -> Mean:
    """The mean over positions and its standard error.

    values: [n]. group: [n] int64; groups differ in size, so the mean is a ratio of totals over
    groups, and its error follows by linearisation: sqrt(G / (G - 1) · Σ_g (Σ_{i in g} (x_i -
    mean))²) / n. noise: the Monte-Carlo error of the mean. The groups' spread holds it already, but
    a few groups may show less: the error is never below it.
    """
    values = values.double()
    mean, groups = values.mean(), len(group.unique())
    if groups == 1:
        return {"value": float(mean), "error": noise}
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(
        0, group, values - mean
    )
    error = float((sums.square().sum() * groups / (groups - 1)).sqrt() / len(values))
    return {"value": float(mean), "error": max(error, noise or 0.0)}
