"""Optimal transport by its whole linear program (Sun et al. 2023, SpecTr): the reference at small
vocabularies.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify.laws import answer, check, counts, independent
from treespec.verify.scheme import Drawing, Scheme

LARGEST = 5000  # sets of drawn tokens, the rows of a program

Law = tuple[float, ...]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Transport:
    """accepted: for each set of drawn tokens, [V] Pr(its tokens are output by the program | set).

    left: [V] what is left of p, the residual of every set. rate: Pr(output is one of the draws).
    """

    accepted: dict[frozenset[int], Array]
    left: Array
    rate: float


def sets_drawn(q: Law, k: int) -> dict[frozenset[int], float]:
    """Pr(the tokens drawn are those) for k independent draws from q.

    Raises InputError for too many sets.
    """
    likely = {x: mass for x, mass in enumerate(q) if mass > 0}
    number = sum(comb(len(likely), j) for j in range(1, k + 1))
    if number > LARGEST:
        raise InputError(
            f"verifier otm-lp: {k} draws of {len(likely)} tokens make {number} sets, its program takes at most "
            f"{LARGEST}; take optimal, which accepts as much"
        )
    found = {frozenset[int](): 1.0}
    for _ in range(k):
        longer: dict[frozenset[int], float] = defaultdict(float)
        for drawn, mass in found.items():
            for x, chance in likely.items():
                longer[drawn | {x}] += mass * chance
        found = longer
    return found


@lru_cache(maxsize=64)
def solve(p: Law, q: Law, k: int) -> Transport:
    """The most mass from k independent draws of q to their own tokens, at most p(x) to each token
    x.

    The solver keeps to its bounds within a tolerance only: what exceeds them is scaled away.
    """
    drawn = sets_drawn(q, k)
    mass = np.zeros((len(drawn), len(p)))
    pairs = [(row, x) for row, tokens in enumerate(drawn) for x in tokens if p[x] > 0]
    target, supply = np.array(p), np.array(list(drawn.values()))
    if pairs:
        rows, columns = np.array(pairs).T
        mass[rows, columns] = _program(rows, columns, supply, target)
    mass *= _share(target, mass.sum(0))
    mass *= _share(supply, mass.sum(1))[:, None]
    accepted = np.divide(mass, supply[:, None], out=np.zeros_like(mass), where=mass > 0)
    left = np.maximum(target - mass.sum(0), 0)
    refused = supply * (1 - accepted.sum(1))
    again = sum(refused[row] * left[list(tokens)].sum() for row, tokens in enumerate(drawn))
    rate = mass.sum() + again / max(left.sum(), np.finfo(float).tiny)
    return Transport(dict(zip(drawn, accepted, strict=True)), left, float(rate))


def _program(
    rows: NDArray[np.int64], columns: NDArray[np.int64], supply: Array, target: Array
) -> Array:
    """[M] the mass of each pair of set and token. supply: [S]; target: [V]."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    pairs = np.arange(len(rows))
    uses = np.concatenate([rows, len(supply) + columns]), np.concatenate([pairs, pairs])
    bounds = np.concatenate([supply, target])
    table = csr_array((np.ones(2 * len(pairs)), uses), shape=(len(bounds), len(pairs)))
    found = linprog(-np.ones(len(pairs)), A_ub=table, b_ub=bounds, method="highs-ds")
    return np.maximum(found.x, 0)


def _share(bound: Array, used: Array) -> Array:
    """min(1, bound / used), and 1 for 0 / 0."""
    return np.minimum(1, np.divide(bound, used, out=np.ones_like(used), where=used > 0))


def _rows(law: Tensor) -> list[Law]:
    """[B, V] to rows of floats, each normalised in float64."""
    law = law.double()
    return [tuple(row) for row in (law / law.sum(-1, keepdim=True)).tolist()]


@final
@dataclass(frozen=True)
class OtmLp(Scheme):
    """Independent draws; a linear program accepts the most that any plan can.

    Solved row by row on the host.

    Raises InputError where the draws of a node make more than 5000 sets of tokens.
    """

    name: ClassVar[str] = "otm-lp"
    drawing: ClassVar[Drawing] = "with replacement"

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        check(self, q, counts(q, k)[0])
        return independent(q, k, generator)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        accepted, left = [], []
        for own_p, own_q, row in zip(_rows(p), _rows(q), draws.tokens.tolist(), strict=True):
            tokens = [x for x in row if x >= 0]
            found = solve(own_p, own_q, len(tokens))
            accepted.append(found.accepted[frozenset(tokens)])
            left.append(found.left)
        every = torch.arange(p.shape[1], device=p.device).expand_as(p)
        return answer(
            p, torch.tensor(np.stack(left)).to(p), every, torch.tensor(np.stack(accepted)).to(p)
        )

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        check(self, q, k)
        rates = [
            solve(own_p, own_q, k).rate for own_p, own_q in zip(_rows(p), _rows(q), strict=True)
        ]
        return torch.tensor(rates, dtype=p.dtype, device=p.device)
