"""Optimal transport by its whole linear program (Sun et al. 2023, SpecTr): the reference at small vocabularies."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array
from torch import Tensor

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify.distributions import Independent, answer

TINY = np.finfo(float).tiny
LARGEST = 5000  # sets of drawn tokens, the rows of a program

Probabilities = tuple[float, ...]
Array = NDArray[np.float64]
# of a solved program: [V] Pr(it outputs the token | the draws), for each set of drawn tokens;
# [V] the mass left of p, the residual of every set; Pr(the output is one of the draws)
Transport = tuple[dict[frozenset[int], Array], Array, float]


def sets_drawn(q: Probabilities, k: int) -> dict[frozenset[int], float]:
    """{set of tokens: Pr(k independent draws from q are these tokens)}.

    Raises InputError for more than 5000 sets.
    """
    likely = {x: mass for x, mass in enumerate(q) if mass > 0}
    number = sum(comb(len(likely), j) for j in range(1, k + 1))
    if number > LARGEST:
        raise InputError(
            f"otm-lp: {k} draws of {len(likely)} tokens make {number} sets, its program takes at most "
            f"{LARGEST}; take optimal, which accepts as much"
        )
    sets = {frozenset[int](): 1.0}
    for _ in range(k):
        longer: dict[frozenset[int], float] = defaultdict(float)
        for drawn, mass in sets.items():
            for x, probability in likely.items():
                longer[drawn | {x}] += mass * probability
        sets = longer
    return sets


@lru_cache(maxsize=64)
def solve(p: Probabilities, q: Probabilities, k: int) -> Transport:
    """The transport with most mass from k draws of q to their tokens, at most p(x) to token x."""
    # 1. The program: a variable for each pair of a set (row) and a token of it, a bound for each set and token.
    drawn = sets_drawn(q, k)
    target, supply = np.array(p), np.array(list(drawn.values()))
    mass = np.zeros((len(drawn), len(p)))
    if not k:
        return {frozenset(): mass[0]}, target, 0.0
    rows, columns = np.array([(row, x) for row, tokens in enumerate(drawn) for x in tokens]).T
    pairs = np.arange(len(rows))
    uses = np.concatenate([rows, len(supply) + columns]), np.concatenate([pairs, pairs])
    bounds = np.concatenate([supply, target])
    table = csr_array((np.ones(2 * len(pairs)), uses), shape=(len(bounds), len(pairs)))
    solution = linprog(-np.ones(len(pairs)), A_ub=table, b_ub=bounds, method="highs-ds")
    mass[rows, columns] = np.maximum(solution.x, 0)

    # 2. The solver keeps its bounds within a tolerance only: scale each excess away.
    mass *= np.minimum(1, target / np.maximum(mass.sum(0), TINY))
    mass *= np.minimum(1, supply / np.maximum(mass.sum(1), TINY))[:, None]

    # 3. The plan given a set, and the acceptance rate: the residual may return a draw.
    accepted = mass / np.maximum(supply, TINY)[:, None]
    left = np.maximum(target - mass.sum(0), 0)
    refused = supply * (1 - accepted.sum(1))
    again = sum(refused[row] * left[list(tokens)].sum() for row, tokens in enumerate(drawn))
    rate = mass.sum() + again / max(left.sum(), TINY)
    return dict(zip(drawn, accepted, strict=True)), left, float(rate)


def _rows(p: Tensor) -> list[Probabilities]:
    """The rows of probabilities [B, V] as tuples of floats, each normalised in float64."""
    p = p.double()
    return [tuple(row) for row in (p / p.sum(-1, keepdim=True)).tolist()]


@final
@dataclass(frozen=True)
class OtmLp(Independent):
    """Independent draws, and the plan that accepts most of all plans, by a linear program.

    Programs are solved row by row on the host. `plan` and `acceptance_rate` raise InputError where
    the draws of a node make more than 5000 sets of tokens.
    """

    name = "otm-lp"

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        accepted, left = [], []
        for row_p, row_q, row in zip(_rows(p), _rows(q), draws.tokens.tolist(), strict=True):
            tokens = [x for x in row if x >= 0]
            of_sets, rest, _ = solve(row_p, row_q, len(tokens))
            accepted.append(of_sets[frozenset(tokens)])
            left.append(rest)
        every_token = torch.arange(p.shape[1], device=p.device).expand_as(p)
        remaining, taken = (torch.tensor(np.stack(rows)).to(p) for rows in (left, accepted))
        return answer(p, remaining, every_token, taken)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        rows = zip(_rows(p), _rows(q), strict=True)
        return p.new_tensor([solve(row_p, row_q, k)[-1] for row_p, row_q in rows])
