"""Every scheme's acceptance rate at collected positions, stated and measured, and the α* of its
draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.collect import Logits
from treespec.eval.acceptance.config import Case
from treespec.sampling import SamplingParams, probs, sample
from treespec.verify.rates import OPTIMA, measured
from treespec.verify.scheme import Scheme

ELEMENTS = 1 << 24  # of a [rows, V] tensor at a time


@dataclass(frozen=True)
class Column:
    """One value a position, of a scheme or of α*; method is the verifier's name, or how draws are
    made for their α*.

    values: [n] rates. errors: [n] their standard errors, None where a formula states them. hits:
    [n] shares of sampled outputs that were draws, None for α*. drawn: how draws are made, where α*
    of that is known.
    """

    method: str
    drawn: str | None
    values: Tensor
    errors: Tensor | None = None
    hits: Tensor | None = None

    @property
    def optimum(self) -> bool:
        return self.hits is None


def rate(
    logits: Logits, case: Case, schemes: dict[str, Scheme], samples: int, generator: torch.Generator
) -> tuple[list[Column], dict[str, str]]:
    """Every scheme and the α* of how their draws are made, at all positions, on the generator's
    device.

    Also why schemes that do not take such draws or laws are left out, by name.
    """
    pieces: dict[tuple[str, bool], list[Column]] = {}
    refused: dict[str, str] = {}
    rows = max(1, ELEMENTS // logits.p.shape[1])
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        params = [
            SamplingParams(t, case.top_k, case.top_p)
            for t in (case.temperature, *case.draft_temperatures)
        ]
        p = probs(p_logits.to(generator.device), params[0])  # [b, V]
        laws = [probs(q_logits.to(generator.device), one) for one in params[1:]]
        q = laws[0] if len(laws) == 1 else torch.stack(laws, dim=1)  # [b, V] or [b, K, V]
        columns = []
        for name, scheme in schemes.items():
            try:
                columns.append(_rated(name, scheme, p, q, case.draws, samples, generator))
            except InputError as error:
                refused[name] = str(error).partition(";")[0]
        kinds = {column.drawn for column in columns} if q.dim() == 2 else set()
        columns += [
            Column(kind, kind, OPTIMA[kind](p, q, case.draws).cpu())
            for kind in OPTIMA
            if kind in kinds
        ]
        for column in columns:
            pieces.setdefault((column.method, column.optimum), []).append(column)
    return [_joined(found) for (name, _), found in pieces.items() if name not in refused], refused


def trials(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, samples: int, generator: torch.Generator
) -> Tensor:
    """[B] the share of samples whose output is one of the draws: draw, plan and sample as in
    decoding.
    """
    every = torch.arange(len(p), device=p.device).repeat_interleave(samples)
    hits = []
    for rows in every.split(max(1, ELEMENTS // p.shape[1])):
        draws = scheme.draw(q[rows], k, generator)
        output = sample(scheme.plan(p[rows], q[rows], draws), generator)
        hits.append((draws.tokens == output[:, None]).any(1))
    return torch.cat(hits).view(len(p), samples).double().mean(1)


def _rated(
    name: str,
    scheme: Scheme,
    p: Tensor,
    q: Tensor,
    k: int,
    samples: int,
    generator: torch.Generator,
) -> Column:
    values, errors = scheme.acceptance_rate(p, q, k), None
    if values is None:
        estimate = measured(scheme, p, q, k, generator, samples)
        values, errors = estimate.value, estimate.error.cpu()
    hits = trials(scheme, p, q, k, samples, generator)
    return Column(name, scheme.drawing, values.cpu(), errors, hits.cpu())


def _joined(pieces: Sequence[Column]) -> Column:
    def together(parts: Iterable[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None

    first, values = pieces[0], torch.cat([piece.values for piece in pieces])
    errors, hits = (
        together(piece.errors for piece in pieces),
        together(piece.hits for piece in pieces),
    )
    return Column(first.method, first.drawn, values, errors, hits)
