"""Compute how likely a text is drafted, for each way to make the draws, and the bound on τ that follows.

Any verifier accepts only paths that are drafted, and it accepts i tokens of a text at most as often as i - 1. So R_i
(`treespec.eval.acceptance.path_probability`) is at most

    C_0 = 1,    C_i = min(C_(i-1), Pr(y_1 … y_i is drafted) / Pr(the target writes y_1 … y_i))

The bound on τ assumes the fewest cycles that any R below C allows (`count_fewest_cycles`). It considers one token of a
node at a time. The optimum α* of the same draws (`treespec.verify.rates`) considers sets of tokens and may be lower.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from scipy.special import gammainccinv, gammaincinv
from torch import Tensor

from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.counts import count_rung_clocks, find_distinct_chances
from treespec.eval.acceptance.path_probability import Pair
from treespec.eval.intervals import Array
from treespec.trees.static import StaticTree
from treespec.verify.distributions import clamp_positive, mask_out, scale, select_most_likely
from treespec.verify.optimal import Optimal
from treespec.verify.rrs import RRS, RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

LOST_MASS = 1e-12  # probability beyond each end of the quadrature
FindDraws = Callable[[Nodes, int, Scheme], Tensor]  # computes Pr(draw i is y) [n, k]


def scale_to_one(masses: Tensor) -> Tensor:
    """Normalise each row of masses [n, V] to a sum of 1; a row of zeros stays. Returns float64."""
    masses = masses.double()
    return masses * scale(masses, torch.ones_like(masses[:, :1]))


def find_in_independent_draws(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute Pr(draw i is y) [n, k] of independent draws, which may repeat y."""
    return scale_to_one(nodes.q).gather(1, nodes.y[:, None]).expand(-1, k)


def find_in_turn(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute Pr(draw i is y) [n, k] of draws without replacement, to 1e-9.

    Each token has a clock that rings after an exponential time of rate q. The draws are the first k tokens to ring. Let
    N(t) be the number of other clocks that have rung at time t. Then

        Pr(draw i + 1 is y) = integral over t of q(y) e^(-q(y) t) Pr(N(t) = i)

    The integral is a trapezoid sum in log t, as in `treespec.verify.rates.integrate_prefixes`.
    """
    # 1. The first draw is y with probability q(y).
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    y_mass = q.gather(1, y)
    if k == 1:
        return y_mass

    # 2. The interval of log t. If only s < k tokens have mass, the s-th draw is the last.
    last_draw = (q > 0).sum(-1, keepdim=True).clamp(max=k)
    top_tokens = select_most_likely(q, k - 1)
    is_before_last = torch.arange(k - 1, device=q.device) < last_draw - 1
    tail_mass = mask_out(q, top_tokens.masked_fill(~is_before_last, -1)).sum(-1, keepdim=True)
    start = math.log(gammaincinv(2, LOST_MASS))
    span = math.log(gammainccinv(k, LOST_MASS)) - start - clamp_positive(tail_mass).log()
    points = math.ceil(span.max().item() * (3 + k / 4))
    step = span / points

    # 3. The sum.
    times = (start + step * torch.arange(points + 1, device=q.device)).exp()  # [n, T]
    rung_clocks = count_rung_clocks(mask_out(q, y), times, k)  # [n, T, k]
    density = y_mass * times * (-y_mass * times).exp() * step
    chances = (density[..., None] * rung_clocks).sum(1)
    chances[:, 0] = y_mass.squeeze(1)
    return chances


def find_in_tops_and_one(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute Pr(draw i is y) [n, k] of the k - 1 most likely tokens and one draw from the other tokens."""
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    top_tokens = select_most_likely(q, k - 1)
    is_top = (top_tokens == y) & (q.gather(1, y) > 0)
    tail = scale_to_one(mask_out(q, top_tokens))
    return torch.cat([is_top.double(), tail.gather(1, y)], 1)


def find_in_hub_pairs(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute Pr(draw i is y) [n, k] of `spechub`: (i, a) with q(i), (a, j) with q(a) q(j) / (1 - q(a))."""
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    y_mass = q.gather(1, y)
    if k == 1:
        return y_mass
    hub = q.argmax(-1, keepdim=True)
    tail = mask_out(q, hub)
    tail_mass = tail.sum(-1, keepdim=True)
    second = torch.where(
        y == hub, tail_mass, q.gather(1, hub) * tail.gather(1, y) / clamp_positive(tail_mass)
    )
    return torch.cat([y_mass, second], 1)


def find_in_tops(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute whether draw i is y [n, k], 0 or 1, if the draws are the k most likely tokens. q: any scores."""
    return (select_most_likely(nodes.q, k) == nodes.y[:, None]).double()


def find_in_tops_and_tail(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute Pr(child i is y) [n, k] of `optimal`: certain tokens, then the distinct tokens of independent draws.

    Two certain tokens, and the slots of the distinct draws behind them, for k = 5:

        child         0    1    2    3    4
        certain       A    B
        distinct                0    1    2
    """
    # 1. The certain tokens, and Pr(y is the i-th distinct token of the independent draws).
    scheme = cast(Optimal, scheme)
    tops, number, tail = scheme.split_certain_and_random(
        nodes.q, torch.full_like(nodes.y[:, None], k), k
    )
    distinct = find_distinct_chances(scale_to_one(tail), nodes.y[:, None], number, k)

    # 2. The distinct draws follow the certain tokens.
    certain_count = (tops >= 0).sum(-1, keepdim=True)
    tail_slot = torch.arange(k, device=certain_count.device) - certain_count
    tail_chances = distinct.gather(1, tail_slot.clamp(min=0)) * (tail_slot >= 0)
    return (tops == nodes.y[:, None]) + tail_chances


# name of a scheme, or of a verifier whose draws are not its scheme's -> the function for its draws
DRAW_FINDERS: Mapping[str, FindDraws] = {
    "single": find_in_independent_draws,
    "rrs": find_in_independent_draws,
    "kseq": find_in_independent_draws,
    "is-lp": find_in_independent_draws,
    "rrs-wo": find_in_turn,
    "gumbel": find_in_turn,
    "greedy": find_in_tops_and_one,
    "spechub": find_in_hub_pairs,
    "optimal": find_in_tops_and_tail,
    "topk": find_in_tops,
}
# how a scheme of another package says that it draws -> the function for its draws
FINDER_BY_DRAWING: Mapping[str | None, FindDraws] = {
    "with replacement": find_in_independent_draws,
    "without replacement": find_in_turn,
    "greedy": find_in_tops_and_one,
}
# functions whose result for k draws begins with that for fewer -> a scheme that stands for all with such draws
SAME_FOR_MORE: Mapping[FindDraws, Scheme] = {
    find_in_independent_draws: RRS(),
    find_in_turn: RRSWithoutReplacement(),
    find_in_tops: TopK(),
}


@dataclass
class DraftedTexts:
    """How likely each pair drafts a text, level by level.

    Attributes:
        pairs: verifiers on trees of fixed shape.
        greedy: whether the temperature is 0; then the draws are the most likely tokens.
        odds: [n] p(y) of each level.
        chances: for each level a dict from (function, scheme, number of draws k) to Pr(draw i is y) [n, k].
    """

    pairs: Sequence[Pair]
    greedy: bool
    odds: list[Tensor] = field(default_factory=list)
    chances: list[dict[tuple[FindDraws, Scheme, int], Tensor]] = field(default_factory=list)

    def choose_finder(self, pair: Pair) -> tuple[FindDraws, Scheme] | None:
        """Choose the function for a pair's draws, and a scheme that draws like the pair's; None if none is known."""
        kind = FINDER_BY_DRAWING.get(pair.name_draws(self.greedy))
        find_draws = DRAW_FINDERS.get(pair.table_name, kind)
        if self.greedy or pair.sure:
            find_draws = find_in_tops
        if find_draws is None:
            return None
        return find_draws, SAME_FOR_MORE.get(find_draws, pair.scheme)

    def add_level(self, nodes: Nodes, scored: Nodes) -> None:
        """Add the next level.

        nodes, scored: an item of `steps` of `treespec.eval.acceptance.path_probability.follow_pairs`.
        """
        # 1. The kinds of draws that pairs need at this level, with the numbers of draws.
        numbers = defaultdict[tuple[FindDraws, Scheme], set[int]](set)
        for pair in self.pairs:
            finder = self.choose_finder(pair)
            if finder:
                numbers[finder] |= pair.count_draws(len(self.chances))

        # 2. Pr(draw i is y) of each.
        level = dict[tuple[FindDraws, Scheme, int], Tensor]()
        for (find_draws, scheme), counts in numbers.items():
            source = nodes
            if find_draws is find_in_tops:
                source = scored
            if find_draws in SAME_FOR_MORE:
                widest = find_draws(source, max(counts, default=1), scheme)
                for k in counts:
                    level[find_draws, scheme, k] = widest[:, :k]
            else:
                for k in counts:
                    level[find_draws, scheme, k] = find_draws(source, k, scheme)
        self.chances.append(level)
        self.odds.append(clamp_positive(nodes.gather_mass(nodes.p)).double())

    def count_fewest(self, pair: Pair) -> float:
        """Count the fewest cycles of any lossless verifier of a pair's draws; NaN if it is not known how it draws."""
        if self.choose_finder(pair) is None:
            return math.nan
        return count_fewest_cycles(self.limit_kept(pair).numpy())

    def limit_kept(self, pair: Pair) -> Tensor:
        """Compute C_0 … C_D [n, D + 1], the largest R of any lossless verifier of a pair's draws.

        D is the depth of the pair's tree.
        """
        limits = [torch.ones_like(self.odds[0])]
        target_chance = limits[0]
        for depth in range(1, pair.tree.max_depth + 1):
            target_chance = target_chance * self.odds[depth - 1]
            drafted_chance = self.find_chance(pair, depth)
            limits.append(torch.minimum(limits[-1], drafted_chance / target_chance))
        return torch.stack(limits, 1)

    def find_chance(self, pair: Pair, depth: int) -> Tensor:
        """Compute Pr(the next `depth` tokens of the text are a path of the tree) [n], from that level up to the root.

        Independent draws may repeat a token; then the path may continue below any of them.
        """
        finder = self.choose_finder(pair)
        assert finder
        find_draws, scheme = finder
        chance_below = {
            path: torch.ones_like(self.odds[0]) for path in list_paths(pair.tree, depth)
        }
        for level in reversed(range(depth)):
            chance_above = dict[tuple[int, ...], Tensor]()
            for path in list_paths(pair.tree, level):
                k = pair.draws.get(path, 0)
                if k == 0:
                    continue
                columns = self.chances[level][find_draws, scheme, k].T
                children = []
                for i, column in enumerate(columns):
                    child = (*path, i)
                    if child in chance_below:
                        children.append(column * chance_below[child])
                if children:
                    chance_above[path] = combine_chances(
                        torch.stack(children), find_draws is find_in_independent_draws
                    )
            chance_below = chance_above
        return chance_below[()]


def list_paths(tree: StaticTree, depth: int) -> list[tuple[int, ...]]:
    """List the paths of the nodes at a depth."""
    return [path for path in tree.paths if len(path) == depth]


def combine_chances(chances: Tensor, are_independent: bool) -> Tensor:
    """Compute Pr(at least one of K events) [n] from their probabilities [K, n].

    are_independent: whether the events are independent; otherwise they exclude each other.
    """
    if not are_independent:
        return chances.sum(0)
    return -torch.log1p(-chances.clamp(max=1)).sum(0).expm1()


def count_fewest_cycles(limits: Array) -> float:
    """Count the fewest cycles, on average, in which any verifier can emit a text, even one that knows the text.

    With probability C_i - C_(i+1) a cycle can accept at most i tokens. The verifier may accept fewer, if the next cycle
    then begins at a better position:

        N_t = 1 + sum over i of (C_i - C_(i+1)) min over j <= i of N_(t+1+j)        after the text N is 0

    Five tokens and draws that always have the next token, C_0 = C_1 = 1, so that a cycle emits two:

        t      0    1    2    3    4
        N_t    3    2    2    1    1        N_4 = 1, N_3 = 1 + N_5 = 1, N_2 = 1 + min(N_3, N_4) = 2

    limits: [n, D + 1] C at each of n positions.
    """
    length, width = limits.shape
    shares = limits - np.pad(limits[:, 1:], ((0, 0), (0, 1)))
    cycles = np.zeros(length + width)
    for position in reversed(range(length)):
        fewest_after = np.minimum.accumulate(cycles[position + 1 : position + 1 + width])
        cycles[position] = 1 + shares[position] @ fewest_after
    return float(cycles[0])
