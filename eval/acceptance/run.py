"""The acceptance lab: what schemes accept of a draft, and what any scheme could accept."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.collect import Logits, collected
from treespec.eval.acceptance.config import AcceptanceConfig, Case, cases, sweeps
from treespec.eval.acceptance.given_laws import read_laws
from treespec.eval.acceptance.plot import plot
from treespec.eval.acceptance.rates import Column, rate
from treespec.eval.acceptance.table import report_of
from treespec.eval.common import Step, listed
from treespec.eval.report import markdown
from treespec.files import locked, write_json, write_text
from treespec.sampling import SamplingParams
from treespec.verify.rates import OPTIMA
from treespec.verify.registry import SCHEMES, scheme_by_name
from treespec.verify.scheme import Scheme


def accept(
    config: AcceptanceConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Collect logits, or take the given laws, then rate every scheme.

    Writes and returns OUT/acceptance.json: {config, environment, left_out, plots, sweeps: [[row]]}. A row is
    {at, method, optimum, drawn, positions, groups, rate, noise, gap, measured}. at: temperature, draft, draws and,
    of given laws, which. optimum: whether it is α* of draws made like `drawn`. rate, gap (α* - α): {value, error},
    the error over positions, by question. noise: the Monte-Carlo error of a rate that no formula states, else None.
    measured: {value, error} of sampled outputs, the error from sampling. Also writes OUT/acceptance.md and plots.
    Raises InputError for bad input.
    """
    planned = [
        (cases(sweep), _schemes(sweep.verifier or "all"), sweep.samples or 2)
        for sweep in sweeps(config)
    ]
    for case in (case for found, _, _ in planned for case in found):
        for temperature in (case.temperature, *case.draft_temperatures):
            SamplingParams(temperature, case.top_k, case.top_p)
    laws = read_laws(config) if config.given_laws else None
    with locked(config.out):
        return rated(Path(config.out), config, planned, laws, report)


def rated(
    out: Path,
    config: AcceptanceConfig,
    planned: list[tuple[list[Case], dict[str, Scheme], int]],
    laws: dict[str, Any] | None,
    report: Callable[[Step], None],
) -> dict[str, Any]:
    """`accept` in a folder that no other process writes into."""
    if laws:
        p, q = (torch.tensor(laws[name], dtype=torch.float64).log() for name in "pq")
        logits, environment = Logits(p, q, torch.arange(len(p))), {"torch": torch.__version__}
    else:
        logits, environment = collected(config, report)

    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(
        config.seed
    )
    total, done = sum(len(found) for found, _, _ in planned), 0
    left_out: dict[str, str] = {}
    tables = []
    for found, schemes, samples in planned:
        rows: list[dict[str, Any]] = []
        for case in found:
            report(
                Step(
                    done, total, f"rates at temperature {case.temperature:g} of {case.draws} draws"
                )
            )
            columns, refused = rate(logits, case, schemes, samples, generator)
            left_out = refused | left_out
            if not columns:
                raise InputError("; ".join(refused.values()))
            rows += _rows(columns, case, logits.group, samples, laws["at"] if laws else None)
            done += 1
        tables.append(rows)
    report(Step(total, total, "tables and plots"))
    result = {
        "config": asdict(config),
        "environment": environment
        | {"treespec": version("treespec"), "rates on": str(generator.device)},
        "left_out": left_out,
        "plots": plot(tables, out),
        "sweeps": tables,
    }
    write_json(out / "acceptance.json", result)
    write_text(out / "acceptance.md", markdown(report_of(result)))
    return result


def average(values: Tensor, group: Tensor) -> dict[str, float | None]:
    """The mean over positions [n] and its standard error, None for one group.

    group: [n] int64. The mean is a ratio of totals over groups, whose sizes differ; its error by linearisation.
    """
    values = values.double()
    mean = values.mean()
    groups = len(group.unique())
    off = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, values - mean)
    error = (
        float((off.square().sum() * groups / (groups - 1)).sqrt() / len(values))
        if groups > 1
        else None
    )
    return {"value": float(mean), "error": error}


def _rows(
    columns: list[Column], case: Case, group: Tensor, samples: int, at: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """A row a column; of given laws, a row a column and law."""
    here = {"temperature": case.temperature, "draft": case.draft, "draws": case.draws}
    every = torch.arange(len(group))
    places = (
        [(here, every)]
        if at is None
        else zip(({**a, **here} for a in at), every.split(1), strict=True)
    )
    optima = {column.drawn: column.values for column in columns if column.optimum}
    for where, taken in places:
        mean = partial(average, group=group[taken])
        for column in columns:
            noise = gap = measured = None
            if column.errors is not None:
                noise = float(column.errors[taken].square().sum().sqrt()) / len(taken)
            if column.drawn in optima and not column.optimum:
                gap = mean((optima[column.drawn] - column.values)[taken])
            if column.hits is not None:
                hits = column.hits[taken]
                error = (hits * (1 - hits)).sum().div(samples - 1).sqrt() / len(hits)
                measured = {"value": float(hits.mean()), "error": float(error)}
            yield {
                "at": where,
                "method": column.method,
                "optimum": column.optimum,
                "drawn": column.drawn,
                "positions": len(taken),
                "groups": len(group[taken].unique()),
                "rate": mean(column.values[taken]),
                "noise": noise,
                "gap": gap,
                "measured": measured,
            }


def _schemes(verifiers: str) -> dict[str, Scheme]:
    """The schemes that --verifier names, in the order of how they draw; all are the lossless ones."""
    lossless = [name for name, scheme in SCHEMES.items() if scheme.lossless]
    names = [
        n for name in listed("verifier", verifiers) for n in (lossless if name == "all" else [name])
    ]
    schemes = {name: scheme_by_name(name, allow_lossy=True) for name in dict.fromkeys(names)}
    for name, scheme in schemes.items():
        if not scheme.lossless:
            raise InputError(
                f"verifier {name} is not lossless: its rate cannot stand beside theirs; leave it out"
            )
        if scheme.draft_temperatures:
            raise InputError(
                f"verifier {name}: give temperatures of its draws by --draft-temperature, such as 1.2/2"
            )
    order = [*OPTIMA, None]
    return dict(sorted(schemes.items(), key=lambda item: order.index(item[1].drawing)))
