"""The acceptance lab: what schemes accept of a draft, and what any scheme could accept."""

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig, cases, schemes_in, sweeps
from treespec.eval.acceptance.otm_lp import OtmLp
from treespec.eval.acceptance.rates import Row, rate, rows_of
from treespec.eval.acceptance.sources import FIGURE_2, collected, given
from treespec.eval.acceptance.table import report_of
from treespec.eval.common import Step
from treespec.eval.report import markdown, page
from treespec.files.atomic import locked, write_json, write_text
from treespec.verify.facts import REFERENCE
from treespec.verify.rates import OPTIMA
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme


def accept(
    config: AcceptanceConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Collect logits, or take the given distributions, then rate every scheme.

    Writes and returns OUT/acceptance.json; also writes OUT/acceptance.md and .html. Its fields:
    config, environment; left_out: why each scheme that is missing does not fit; sweeps: the rows of
    each sweep. Raises InputError for bad input.
    """
    # 1. What is compared, and where p and q come from.
    planned = [(sweep, case) for sweep in sweeps(config) for case in cases(sweep)]
    schemes = {sweep: schemes_of(sweep.verifier or "all") for sweep, _ in planned}
    known = given(config.laws or FIGURE_2) if config.given_laws else None
    with locked(config.out):
        if known:
            (logits, names), environment = known, dict[str, object](torch=str(torch.__version__))
        else:
            (logits, environment), names = collected(config, report), []

        # 2. The rates of every case.
        generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
        generator.manual_seed(config.seed)
        left_out: dict[str, str] = {}
        tables: dict[AcceptanceConfig, list[Row]] = {}
        for done, (sweep, case) in enumerate(planned):
            text = f"rates at temperature {case.temperature:g} of {case.draws} draws"
            report(Step(done, len(planned), text))
            samples = sweep.samples or 2
            rated, refused = rate(logits, case, schemes[sweep], samples, generator)
            left_out = refused | left_out
            if not rated:
                raise InputError("; ".join(refused.values()))
            tables.setdefault(sweep, []).extend(rows_of(rated, case, logits.group, names))

        # 3. The files.
        environment |= {"treespec": version("treespec"), "rates on": str(generator.device)}
        result = {
            "config": asdict(config),
            "environment": environment,
            "left_out": left_out,
            "sweeps": list(tables.values()),
        }
        out, shown = Path(config.out), report_of(result)
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
