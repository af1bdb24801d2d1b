"""Acceptance rates of schemes at collected positions, beside their α*."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.config import Case
from treespec.eval.acceptance.sources import Coordinates, Logits
from treespec.shaping.sampling import SamplingParams, probs
from treespec.verify.rates import OPTIMA, measured
from treespec.verify.scheme import Scheme

ELEMENTS = 1 << 24  # most elements of a [rows, V] tensor: 64 MiB in float32


Mean = dict[str, float | None]  # `value`, and its standard `error`: None where one group gives none
Row = dict[str, Any]  # one method at one place, as `rows_of` makes it


@dataclass(frozen=True)
class MethodRates:
    """The acceptance rates of one scheme, or α*, at n positions.

    method: the scheme's name, or for α* how its draws are made. drawn: how the draws are made,
    where α* of that is known. values: [n] rates. errors: [n] their Monte-Carlo standard errors, 0
    where a formula states them. optimum: whether these rates are α*.
    """

    method: str
    drawn: str | None
    values: Tensor
    errors: Tensor
    optimum: bool = False


def rate(
    logits: Logits, case: Case, schemes: dict[str, Scheme], samples: int, generator: torch.Generator
) -> tuple[list[MethodRates], dict[str, str]]:
    """(the rates of every scheme and the α* of their draws, why others were left out, by name).

    The generator's device computes. samples: Monte-Carlo samples per position.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks = defaultdict[tuple[str, str | None, bool], list[tuple[Tensor, Tensor]]](list)
    refused: dict[str, str] = {}
    rows = max(1, ELEMENTS // logits.p.shape[1])
    target, *of_draws = (
        SamplingParams(t, case.top_k, case.top_p)
        for t in (case.temperature, *case.draft_temperatures)
    )
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        p = probs(p_logits.to(generator.device), target)  # [B, V]
        laws = [probs(q_logits.to(generator.device), params) for params in of_draws]
        q = laws[0] if len(laws) == 1 else torch.stack(laws, dim=1)  # [B, V] or [B, K, V]

        # 2. The schemes that take such draws, and α* of their draws; it is known for draws from one distribution.
        drawn = set()
        for name, scheme in schemes.items():
            try:
                found = measured(scheme, p, q, case.draws, generator, samples)
            except InputError as error:
                refused[name] = str(error).partition(";")[0]
            else:
                drawn.add(scheme.drawing)
                chunk = found.value.cpu(), found.error.cpu()
                chunks[name, scheme.drawing, False].append(chunk)
        for kind in (kind for kind in OPTIMA if kind in drawn and q.dim() == 2):
            values = OPTIMA[kind](p, q, case.draws).cpu()
            chunks[kind, kind, True].append((values, torch.zeros_like(values)))

    # 3. All positions; a scheme refused in one chunk is left out everywhere.
    whole = [
        MethodRates(
            name,
            kind,
            torch.cat([values for values, _ in parts]),
            torch.cat([errors for _, errors in parts]),
            optimum,
        )
        for (name, kind, optimum), parts in chunks.items()
        if name not in refused
    ]
    return whole, refused


def rows_of(
    rated: list[MethodRates], case: Case, group: Tensor, names: Sequence[Coordinates]
) -> Iterator[Row]:
    """A row per method; with given distributions, a row per pair of them and method.

    at: temperature, draft (its temperature), draws and, for given distributions, which. method,
    optimum, drawn: as of `MethodRates`. positions, groups: their numbers; a group is a question or
    text. rate: α or α*; its error is over positions, by group, and at least `noise`: the
    Monte-Carlo error of a rate that no formula states. gap: α* - α of the same draws, with an error
    alike.

    group: [n] int64. names: what names each pair; (): all positions are one place.
    """
    # 1. The places, and the positions [m] of each.
    here: Coordinates = {"temperature": case.temperature, "draft": case.draft, "draws": case.draws}
    every = torch.arange(len(group))
    places = [(name | here, every[i : i + 1]) for i, name in enumerate(names)] or [(here, every)]

    # 2. Each method at each place, beside the α* of its draws.
    optima = {rates.drawn: rates.values for rates in rated if rates.optimum}
    for at, positions in places:
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
