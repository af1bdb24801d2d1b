"""The acceptance lab: what schemes accept of a draft, and what any scheme could accept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.collect import Logits, collected
from treespec.eval.acceptance.config import AcceptanceConfig, Case, cases, schemes_in, sweeps
from treespec.eval.acceptance.given_laws import Laws, read_laws
from treespec.eval.acceptance.plot import plot
from treespec.eval.acceptance.rates import MethodRates, rate
from treespec.eval.acceptance.result import AcceptanceResult, Coordinates, Mean, Row
from treespec.eval.acceptance.table import report_of
from treespec.eval.common import Step
from treespec.eval.report import markdown
from treespec.files.atomic import locked, write_json, write_text
from treespec.shaping.sampling import SamplingParams
from treespec.verify.rates import OPTIMA
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Sweep:
    """Cases to rate schemes at. samples: Monte-Carlo samples per position."""

    cases: list[Case]
    schemes: dict[str, Scheme]
    samples: int


def accept(
    config: AcceptanceConfig, report: Callable[[Step], None] = lambda step: None
) -> AcceptanceResult:
    """Collect logits, or take the given laws, then rate every scheme.

    Writes and returns OUT/acceptance.json; also writes OUT/acceptance.md and plots. Raises
    InputError for bad input.
    """
    planned = [
        Sweep(cases(sweep), schemes_of(sweep.verifier or "all"), sweep.samples or 2)
        for sweep in sweeps(config)
    ]
    for case in (case for sweep in planned for case in sweep.cases):
        for temperature in (case.temperature, *case.draft_temperatures):
            SamplingParams(temperature, case.top_k, case.top_p)  # raises for a bad value
    laws = read_laws(config) if config.given_laws else None
    with locked(config.out):
        return measure(config, planned, laws, report)


def measure(
    config: AcceptanceConfig,
    planned: list[Sweep],
    laws: Laws | None,
    report: Callable[[Step], None],
) -> AcceptanceResult:
    """`accept` in a folder that no other process writes into."""
    # 1. Logits of target and draft at n positions; a given pair of laws is one position.
    if laws:
        p = torch.tensor(laws["p"], dtype=torch.float64).log()
        q = torch.tensor(laws["q"], dtype=torch.float64).log()
        logits = Logits(p, q, torch.arange(len(p)))
        environment: dict[str, object] = {"torch": torch.__version__}
    else:
        logits, environment = collected(config, report)

    # 2. The rates of every case.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(config.seed)
    total, done = sum(len(sweep.cases) for sweep in planned), 0
    left_out: dict[str, str] = {}
    tables: list[list[Row]] = []
    for sweep in planned:
        rows: list[Row] = []
        for case in sweep.cases:
            place = f"temperature {case.temperature:g} of {case.draws} draws"
            report(Step(done, total, f"rates at {place}"))
            rated, refused = rate(logits, case, sweep.schemes, sweep.samples, generator)
            left_out = refused | left_out
            if not rated:
                raise InputError("; ".join(refused.values()))
            names = laws["at"] if laws else None
            rows += rows_of(rated, case, logits.group, sweep.samples, names)
            done += 1
        tables.append(rows)

    # 3. The files.
    out = Path(config.out)
    report(Step(total, total, "tables and plots"))
    libraries = {"treespec": version("treespec"), "rates on": str(generator.device)}
    result: AcceptanceResult = {
        "config": asdict(config),
        "environment": environment | libraries,
        "left_out": left_out,
        "plots": plot(tables, out),
        "sweeps": tables,
    }
    write_json(out / "acceptance.json", result)
    write_text(out / "acceptance.md", markdown(report_of(result)))
    return result


def average(values: Tensor, group: Tensor, noise: float | None = None) -> Mean:
    """The mean over positions and its standard error.

    values: [n]. group: [n] int64; groups differ in size, so the mean is a ratio of totals over
    groups, and its error follows by linearisation: sqrt(G / (G - 1) · Σ_g (Σ_{i in g} (x_i -
    mean))²) / n. noise: the Monte-Carlo error of the mean. The groups' spread holds it already, but
    a few groups may show less: the error is never below it.
    """
    values = values.double()
    mean = values.mean()
    groups = len(group.unique())
    if groups == 1:
        return {"value": float(mean), "error": noise}
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, group, values - mean)
    spread = sums.square().sum() * groups / (groups - 1)
    error = float(spread.sqrt() / len(values))
    return {"value": float(mean), "error": max(error, noise or 0.0)}


def rows_of(
    rated: list[MethodRates],
    case: Case,
    group: Tensor,
    samples: int,
    law_names: Sequence[Coordinates] | None,
) -> Iterator[Row]:
    """A row per method; with given laws, a row per law and method.

    group: [n] int64. law_names: what names each law; None: all positions are one place.
    """
    # 1. The places, and the positions [m] of each.
    here: Coordinates = {
        "temperature": case.temperature,
        "draft": case.draft,
        "draws": case.draws,
    }
    every = torch.arange(len(group))
    places = [(here, every)]
    if law_names is not None:
        places = [(name | here, one) for name, one in zip(law_names, every.split(1), strict=True)]

    # 2. Each method at each place, beside the α* of its draws.
    optima = {rates.drawn: rates.values for rates in rated if rates.optimum}
    for at, positions in places:
        mean = partial(average, group=group[positions])
        for rates in rated:
            noise = gap = None
            if rates.errors is not None:
                noise = float(rates.errors[positions].square().sum().sqrt()) / len(positions)
            if rates.drawn in optima and not rates.optimum:
                gap = mean((optima[rates.drawn] - rates.values)[positions], noise=noise)
            yield {
                "at": at,
                "method": rates.method,
                "optimum": rates.optimum,
                "drawn": rates.drawn,
                "positions": len(positions),
                "groups": len(group[positions].unique()),
                "rate": mean(rates.values[positions], noise=noise),
                "noise": noise,
                "gap": gap,
                "measured": _measured(rates.hits, positions, samples),
            }


def _measured(hits: Tensor | None, positions: Tensor, samples: int) -> Mean | None:
    """The mean share of sampled outputs that were draws, and its error from sampling alone."""
    if hits is None:
        return None
    shares = hits[positions]
    variance = (shares * (1 - shares)).sum() / (samples - 1)
    return {"value": float(shares.mean()), "error": float(variance.sqrt() / len(shares))}


def schemes_of(verifiers: str) -> dict[str, Scheme]:
    """The schemes that `--verifier` names, ordered by how they draw; `all`: every lossless one.

    Raises InputError for an unknown or lossy scheme, and for one with draft temperatures of its
    own.
    """
    schemes = {name: scheme_by_name(name) for name in schemes_in(verifiers)}
    order = [*OPTIMA, None]
    return dict(sorted(schemes.items(), key=lambda item: order.index(item[1].drawing)))
