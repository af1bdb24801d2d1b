"""Importance sampling by a linear program (Khisti et al. 2025, Multi-Draft Speculative Sampling)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.errors import InputError
from treespec.trees.ranges import Range, outside
from treespec.trees.static import StaticTree, balanced
from treespec.trees.tree import Draws
from treespec.verify.laws import (
    check_temperatures,
    independent,
    laws_of,
    normalise,
    overlap,
    ratio,
    single_draft,
    without,
)
from treespec.verify.scheme import Drawing, Scheme


@dataclass(frozen=True)
class Duel:
    """How one of two draws is selected.

    law: [B, V] that of the selected token. order: [B, V] int64, the tokens by rank. wins: [B, s, s]
    Pr(the token of rank i is selected from it and the token of rank j), 1 on the diagonal; beyond s
    the lower rank wins. pairs: [B, s, s] Pr(the draws are those two tokens, in any order), 0 on the
    diagonal.
    """

    law: Tensor
    order: Tensor
    wins: Tensor
    pairs: Tensor

    def keeps(self, tokens: Tensor, rival: Tensor) -> Tensor:
        """[B, K] Pr(each of the tokens [B, K] is selected over the rival [B, 1])."""
        s = self.wins.shape[-1]
        ranks = torch.arange(self.order.shape[-1], device=tokens.device).expand_as(self.order)
        rank = torch.empty_like(self.order).scatter_(1, self.order, ranks)
        mine, other = rank.gather(1, tokens), rank.gather(1, rival)
        free = self.wins.flatten(1).gather(1, mine.clamp(max=s - 1) * s + other.clamp(max=s - 1))
        return torch.where(torch.maximum(mine, other) < s, free, (mine <= other).to(free.dtype))


def duel(p: Tensor, q1: Tensor, q2: Tensor, s: int) -> Duel:
    """The truncated program for draws from q1 and q2 against p, all [B, V]; s tokens are free."""
    order = ascending(q1 * q2 - p)
    p, q1, q2 = (law.gather(1, order) for law in (p, q1, q2))
    later1, later2 = (
        law.sum(-1, keepdim=True) - law.cumsum(-1) for law in (q1, q2)
    )  # mass of the ranks beyond
    law = q1 * q2 + q1 * later2 + q2 * later1

    s = min(s, p.shape[-1])
    pairs = q1[:, :s, None] * q2[:, None, :s]
    pairs = (pairs + pairs.mT) * (1 - torch.eye(s, dtype=p.dtype, device=p.device))
    fixed = (q1 * q2)[:, :s] + q1[:, :s] * later2[:, s - 1 : s] + q2[:, :s] * later1[:, s - 1 : s]
    wins = solve(p[:, :s] - fixed, pairs)
    law[:, :s] = fixed + (wins * pairs).sum(-1)
    return Duel(torch.empty_like(law).scatter_(1, order, law), order, wins, pairs)


def ascending(scores: Tensor) -> Tensor:
    """[B, V] int64, the order of the scores.

    NumPy sorts a row on the CPU in a fifth of torch's time.
    """
    return torch.from_numpy(scores.numpy().argsort(-1)) if scores.is_cpu else scores.argsort(-1)


def solve(room: Tensor, pairs: Tensor) -> Tensor:
    """[B, s, s] the shares of the pairs that fill the room best. room: [B, s]; pairs: [B, s, s].

    On the host.

    The program: maximise the sum of t_i <= room_i, t_i at most what token i gets of its pairs.
    """
    held = pairs.triu()  # the earlier token wins
    fits = held.sum(-1) <= room
    rows = (fits.any(-1) & ~fits.all(-1)).tolist()  # elsewhere that is optimal
    masses, rooms = held.tolist(), room.clamp(min=0).tolist()
    best = [
        flow(mass, space) if row else mass
        for mass, space, row in zip(masses, rooms, rows, strict=True)
    ]
    shares = torch.tensor(best, dtype=pairs.dtype, device=pairs.device) / pairs
    return shares.where(pairs > 0, torch.ones_like(pairs).triu())


def flow(held: list[list[float]], room: list[float]) -> list[list[float]]:
    """What each token i holds of its pair with each j, after the shortest ways (Edmonds and Karp)
    to more room.

    held[i][j] can be passed from i to j. Ways lead from tokens that hold more than their room to
    ones that hold less; where there are none left, no other holding fills more room.
    """
    over = [sum(held[i]) - room[i] for i in range(len(room))]
    while True:
        source: dict[int, int] = {i: i for i in range(len(room)) if over[i] > 0}
        for i in (queue := list(source)):
            if over[i] < 0:
                break
            found = [j for j, mass in enumerate(held[i]) if mass > 0 and j not in source]
            source.update(dict.fromkeys(found, i))
            queue += found
        else:
            return held
        way = [i]
        while source[way[-1]] != way[-1]:
            way.append(source[way[-1]])
        steps = [(giver, taker) for taker, giver in pairwise(way)]
        mass = min(-over[i], over[way[-1]], *(held[giver][taker] for giver, taker in steps))
        over[i] += mass
        over[way[-1]] -= mass
        for giver, taker in steps:
            held[giver][taker] -= mass
            held[taker][giver] += mass


def select(p: Tensor, q: Tensor, tokens: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Pair by pair.

    Returns [B, K], Pr(each draw is selected), and the selected token's law [B, V].
    """
    at = tokens.clamp(min=0)
    chosen = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    chosen[:, 0] = 1
    law, *laws = laws_of(q, tokens.shape[1])
    for k, rival in enumerate(laws, start=1):
        rows = (tokens[:, k] >= 0).nonzero().squeeze(1)
        if not len(rows):
            continue
        new = duel(p[rows], law[rows], rival[rows], s)
        kept = chosen[rows, :k] * new.keeps(at[rows, :k], at[rows, k : k + 1])
        chosen[rows, k] = (chosen[rows, :k] - kept).sum(-1)
        chosen[rows, :k] = kept
        law = law.index_copy(0, rows, new.law)
    return chosen * (tokens >= 0), law


def verify(p: Tensor, q: Tensor, tokens: Tensor, s: int) -> Tensor:
    """[B, V] the plan over a whole alphabet."""
    chosen, law = select(p, q, tokens, s)
    return single_draft(p, law, tokens, chosen)


def rate(p: Tensor, q: Tensor, s: int) -> Tensor:
    """[B] Pr(output is one of two draws): the selected one, or the other where that is refused."""
    q1, q2 = laws_of(q, 2)
    new = duel(p, q1, q2, s)
    refused = 1 - ratio(p, new.law)
    rest = normalise((p - new.law).clamp_(min=0), p)
    refused, rest, q1, q2 = (law.gather(1, new.order) for law in (refused, rest, q1, q2))
    lost = torch.stack([q1, q2], dim=1) * refused[:, None]
    earlier = pad(lost.cumsum(-1)[..., :-1], (1, 0))  # [B, 2, V] refused mass of the ranks before
    other = (earlier * torch.stack([q2, q1], dim=1)).sum(
        1
    )  # [B, V] Pr(this loses to a draw that is refused)
    width = new.wins.shape[-1]
    other[:, :width] = (new.wins * new.pairs * refused[:, :width, None]).sum(1)
    return overlap(p, new.law) + (rest * other).sum(-1)


def lump(p: Tensor, q: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens inside [B, A] and, as token A, all others: p with 0 there, q, and [B, V] the new
    numbers.
    """
    index = inside if q.dim() == 2 else inside[:, None].expand(-1, q.shape[1], -1)
    others = q.scatter(-1, index, 0).sum(-1, keepdim=True)
    number = torch.full(p.shape, inside.shape[1], device=p.device)
    number.scatter_(1, inside, torch.arange(inside.shape[1], device=p.device).expand_as(inside))
    return pad(p.gather(1, inside), (0, 1)), torch.cat([q.gather(-1, index), others], -1), number


@final
@dataclass(frozen=True)
class IsLp(Scheme):
    """Independent draws; a linear program selects one, which is verified as a single draft of its
    exact law.

    q: [B, V] or [B, K, V]. More than two draws: pair by pair, the selected one against the next.
    s: tokens whose pairs the program decides; the others follow a fixed order.
    alphabet: how many of the likeliest target tokens two draws can answer; the others are one token
    to the program and come from p alone. None is all. Programs are solved on the host.
    draft_temperatures: of each draw in order, as multiples of the sampling temperature; the last
    repeats.
    """

    name: ClassVar[str] = "is-lp"
    drawing: ClassVar[Drawing] = "with replacement"
    law_per_draw: ClassVar[bool] = True
    default_tree: ClassVar[StaticTree] = balanced(2, 3)

    s: int = 5
    alphabet: int | None = None
    draft_temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_temperatures(self, self.draft_temperatures)
        ranges = {
            "s": Range(least=1, most=256, whole=True),
            "alphabet": Range(least=1, most=10**7, whole=True),
        }
        if wrong := outside(self, **ranges):
            raise InputError(f"is-lp: {wrong}")

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        return independent(q, k, generator)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        tokens = draws.tokens
        if self.alphabet is None or self.alphabet >= p.shape[-1]:
            return verify(p, q, tokens, self.s)
        inside = p.topk(self.alphabet).indices  # [B, A]
        small_p, small_q, number = lump(p, q, inside)
        small_tokens = number.gather(1, tokens.clamp(min=0)).masked_fill(tokens < 0, -1)
        share = small_p.sum(-1, keepdim=True)
        small = verify(small_p / share, small_q, small_tokens, self.s)[:, :-1] * share
        plan = without(p, inside).scatter_add_(1, inside, small)
        several = (tokens >= 0).sum(-1, keepdim=True) > 1
        return torch.where(several, plan, single_draft(p, laws_of(q, 1)[0], tokens[:, :1]))

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """Exact for one and two draws; None beyond, as draws that lost may come out of the
        residual.
        """
        if k > 2:
            return None
        if k == 1:
            return overlap(p, laws_of(q, 1)[0])
        if self.alphabet is None or self.alphabet >= p.shape[-1]:
            return rate(p, q, self.s)
        inside = p.topk(self.alphabet).indices
        small_p, small_q, _ = lump(p, q, inside)
        share = small_p.sum(-1)
        q1, q2 = laws_of(q, 2)
        drawn = q1 + q2 - q1 * q2
        chance = (without(p, inside) * drawn).sum(-1)
        return rate(small_p / share[:, None], small_q, self.s) * share + chance
