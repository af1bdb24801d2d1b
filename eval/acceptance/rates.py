"""Acceptance rates of schemes at collected positions, stated and measured, beside their α*."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.eval.acceptance.collect import Logits
from treespec.eval.acceptance.config import Case
from treespec.shaping.sampling import SamplingParams, probs, sample
from treespec.verify.rates import OPTIMA, measured
from treespec.verify.scheme import Scheme

ELEMENTS = 1 << 24  # most elements of a [rows, V] tensor: 64 MiB in float32


@dataclass(frozen=True)
class MethodRates:
    """The acceptance rates of one scheme, or α*, at n positions.

    method: the scheme's name, or for α* how its draws are made. drawn: how the draws are made,
    where α* of that is known. values: [n] rates. errors: [n] their Monte-Carlo standard errors;
    None: a formula states them. hits: [n] the share of sampled outputs that were draws; None for
    α*.
    """

    method: str
    drawn: str | None
    values: Tensor
    errors: Tensor | None = None
    hits: Tensor | None = None

    @property
    def optimum(self) -> bool:
        """Whether these rates are α*."""
        return self.hits is None


def rate(
    logits: Logits, case: Case, schemes: dict[str, Scheme], samples: int, generator: torch.Generator
) -> tuple[list[MethodRates], dict[str, str]]:
    """(the rates of every scheme and the α* of their draws, why others were left out, by name).

    The generator's device computes. samples: Monte-Carlo samples per position.
    """
    # 1. Positions in chunks, so that a [rows, V] tensor fits in memory.
    chunks: dict[tuple[str, bool], list[MethodRates]] = {}
    refused: dict[str, str] = {}
    rows = max(1, ELEMENTS // logits.p.shape[1])
    temperatures = (case.temperature, *case.draft_temperatures)
    params = [SamplingParams(t, case.top_k, case.top_p) for t in temperatures]
    for p_logits, q_logits in zip(logits.p.split(rows), logits.q.split(rows), strict=True):
        p = probs(p_logits.to(generator.device), params[0])  # [B, V]
        laws = [probs(q_logits.to(generator.device), of_draw) for of_draw in params[1:]]
        q = laws[0] if len(laws) == 1 else torch.stack(laws, dim=1)  # [B, V] or [B, K, V]

        # 2. The schemes that take such draws and laws.
        rated = []
        for name, scheme in schemes.items():
            try:
                rated.append(_rated(name, scheme, p, q, case.draws, samples, generator))
            except InputError as error:
                refused[name] = str(error).partition(";")[0]

        # 3. α* of their draws; it is known for draws from one law.
        drawn = {rates.drawn for rates in rated} if q.dim() == 2 else set()
        for kind in OPTIMA:
            if kind in drawn:
                rated.append(MethodRates(kind, kind, OPTIMA[kind](p, q, case.draws).cpu()))
        for rates in rated:
            chunks.setdefault((rates.method, rates.optimum), []).append(rates)

    # 4. All positions; a scheme refused in one chunk is left out everywhere.
    joined = [_joined(parts) for (name, _), parts in chunks.items() if name not in refused]
    return joined, refused


def trials(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, samples: int, generator: torch.Generator
) -> Tensor:
    """[B] the share of samples whose output is one of the draws, drawn and answered as in decoding.

    p: [B, V]. q: [B, V] or [B, K, V]. k: draws at each of the B nodes.
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
) -> MethodRates:
    """One scheme's rates, from its formula or by Monte Carlo.

    Raises InputError if the scheme cannot draw so.
    """
    values, errors = scheme.acceptance_rate(p, q, k), None
    if values is None:
        estimate = measured(scheme, p, q, k, generator, samples)
        values, errors = estimate.value, estimate.error.cpu()
    hits = trials(scheme, p, q, k, samples, generator)
    return MethodRates(name, scheme.drawing, values.cpu(), errors, hits.cpu())


def _joined(parts: Sequence[MethodRates]) -> MethodRates:
    """The chunks of one method, end to end."""

    def together(tensors: Iterable[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    values = torch.cat([part.values for part in parts])
    errors, hits = together(p.errors for p in parts), together(p.hits for p in parts)
    return MethodRates(parts[0].method, parts[0].drawn, values, errors, hits)
