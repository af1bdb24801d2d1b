"""How likely a text is to be drafted, by how the draws are made, and the bound of τ that follows.

Whatever verifies, a cycle keeps only paths that are drafted, and more tokens of a text never more often than fewer. So
R_i (`treespec.eval.acceptance.path_probability`) is at most

    C_0 = 1,    C_i = min(C_(i-1), Pr(y_1 … y_i is drafted) / Pr(the target writes y_1 … y_i))

The bound of τ takes the fewest cycles that any R below C allows (`count_fewest_cycles`). At one node it looks at one
token at a time: the optimum α* of these draws (`treespec.verify.rates`), which looks at sets of tokens, may be lower.
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
FindDraws = Callable[[Nodes, int, Scheme], Tensor]


def scale_to_one(masses: Tensor) -> Tensor:
    """[n, V] in float64, each row with a sum of 1 or 0."""
    masses = masses.double()
    return masses * scale(masses, torch.ones_like(masses[:, :1]))


def find_in_independent_draws(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] Pr(draw i is y) of independent draws, which may repeat y."""
    return scale_to_one(nodes.q).gather(1, nodes.y[:, None]).expand(-1, k)


def find_in_turn(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] Pr(draw i is y) of draws without replacement, to 1e-9.

    Each token has a clock that rings after an exponential time of rate q. The draws are the first k to ring, so with
    N(t) the number of other clocks that have rung at time t

        Pr(draw i + 1 is y) = integral over t of q(y) e^(-q(y) t) Pr(N(t) = i)

    The integral is a trapezoid sum in log t, as that of `treespec.verify.rates.integrate_prefixes`.
    """
    # 1. The first draw is y with q(y).
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    here = q.gather(1, y)
    if k == 1:
        return here

    # 2. The interval of log t. Of s tokens, s < k, the last to ring is the s-th.
    last = (q > 0).sum(-1, keepdim=True).clamp(max=k)
    top_tokens = select_most_likely(q, k - 1)
    is_before_last = torch.arange(k - 1, device=q.device) < last - 1
    left = mask_out(q, top_tokens.masked_fill(~is_before_last, -1)).sum(-1, keepdim=True)
    start = math.log(gammaincinv(2, LOST_MASS))
    span = math.log(gammainccinv(k, LOST_MASS)) - start - clamp_positive(left).log()
    points = math.ceil(span.max().item() * (3 + k / 4))
    step = span / points

    # 3. The sum.
    times = (start + step * torch.arange(points + 1, device=q.device)).exp()  # [n, T]
    rung = count_rung_clocks(mask_out(q, y), times, k)  # [n, T, k]
    density = here * times * (-here * times).exp() * step
    chances = (density[..., None] * rung).sum(1)
    chances[:, 0] = here.squeeze(1)
    return chances


def find_in_tops_and_one(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] Pr(draw i is y) of the k - 1 most likely tokens and one draw from the rest."""
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    top_tokens = select_most_likely(q, k - 1)
    is_top = (top_tokens == y) & (q.gather(1, y) > 0)
    rest = scale_to_one(mask_out(q, top_tokens))
    return torch.cat([is_top.double(), rest.gather(1, y)], 1)


def find_in_hub_pairs(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] Pr(draw i is y) of `spechub`: (i, a) with q(i), (a, j) with q(a) q(j) / (1 - q(a))."""
    q = scale_to_one(nodes.q)
    y = nodes.y[:, None]
    here = q.gather(1, y)
    if k == 1:
        return here
    hub = q.argmax(-1, keepdim=True)
    rest = mask_out(q, hub)
    left = rest.sum(-1, keepdim=True)
    second = torch.where(
        y == hub, left, q.gather(1, hub) * rest.gather(1, y) / clamp_positive(left)
    )
    return torch.cat([here, second], 1)


def find_in_tops(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] whether draw i is y, of the k most likely tokens. q: any scores."""
    return (select_most_likely(nodes.q, k) == nodes.y[:, None]).double()


def find_in_tops_and_tail(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """[n, k] Pr(child i is y) of `optimal`: sure tokens, then the distinct ones of its independent draws."""
    # 1. The sure tokens, and the place of y among the distinct draws.
    scheme = cast(Optimal, scheme)
    tops, number, rest = scheme.split_certain_and_random(
        nodes.q, torch.full_like(nodes.y[:, None], k), k
    )
    distinct = find_distinct_chances(scale_to_one(rest), nodes.y[:, None], number, k)

    # 2. The draws stand behind the sure tokens.
    sure = (tops >= 0).sum(-1, keepdim=True)
    place = torch.arange(k, device=sure.device) - sure
    drawn = distinct.gather(1, place.clamp(min=0)) * (place >= 0)
    return (tops == nodes.y[:, None]) + drawn


# By a scheme, or a verifier whose draws are not its scheme's.
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
# Where the first draws are the same however many follow: a scheme that draws so.
SAME_FOR_MORE: Mapping[FindDraws, Scheme] = {
    find_in_independent_draws: RRS(),
    find_in_turn: RRSWithoutReplacement(),
    find_in_tops: TopK(),
}


@dataclass
class DraftedTexts:
    """How likely a text is drafted by each pair. chances: by level of the tree, Pr(draw i is y), by draws and number.

    pairs: verifiers on trees of fixed shape. greedy: of temperature 0, where the draws are the most likely tokens.
    """

    pairs: Sequence[Pair]
    greedy: bool
    odds: list[Tensor] = field(default_factory=list)  # [n] p(y), by level
    chances: list[dict[tuple[FindDraws, Scheme, int], Tensor]] = field(default_factory=list)

    def choose_finder(self, pair: Pair) -> tuple[FindDraws, Scheme]:
        """What tells where a pair's draws are y, and a scheme that draws like the pair's."""
        find = DRAW_FINDERS.get(pair.verifier, DRAW_FINDERS[pair.scheme.name])
        if self.greedy or pair.sure:
            find = find_in_tops
        return find, SAME_FOR_MORE.get(find, pair.scheme)

    def add_level(self, nodes: Nodes, scored: Nodes) -> None:
        """Take the draws of the next level; as `treespec.eval.acceptance.path_probability.follow_pairs` has them."""
        # 1. Which draws, and how many of them.
        numbers = defaultdict[tuple[FindDraws, Scheme], set[int]](set)
        for pair in self.pairs:
            numbers[self.choose_finder(pair)] |= pair.count_draws(len(self.chances))

        # 2. Where they are y.
        level = dict[tuple[FindDraws, Scheme, int], Tensor]()
        for (find, scheme), counts in numbers.items():
            source = nodes
            if find is find_in_tops:
                source = scored
            if find in SAME_FOR_MORE:
                widest = find(source, max(counts, default=1), scheme)
                for k in counts:
                    level[find, scheme, k] = widest[:, :k]
            else:
                for k in counts:
                    level[find, scheme, k] = find(source, k, scheme)
        self.chances.append(level)
        self.odds.append(clamp_positive(nodes.gather_mass(nodes.p)).double())

    def limit_kept(self, pair: Pair) -> Tensor:
        """[n, D + 1] C_0 … C_D, D the depth of the pair's tree: no lossless verifier of its draws has a larger R."""
        limits = [torch.ones_like(self.odds[0])]
        target = limits[0]
        for depth in range(1, pair.tree.max_depth + 1):
            target = target * self.odds[depth - 1]
            drafted = self.find_chance(pair, depth)
            limits.append(torch.minimum(limits[-1], drafted / target))
        return torch.stack(limits, 1)

    def find_chance(self, pair: Pair, depth: int) -> Tensor:
        """[n] Pr(the first `depth` tokens of the text are a path of the tree), from its last level up.

        Children that repeat a token count together.
        """
        find, scheme = self.choose_finder(pair)
        below = {path: torch.ones_like(self.odds[0]) for path in list_paths(pair.tree, depth)}
        for level in reversed(range(depth)):
            above = dict[tuple[int, ...], Tensor]()
            for path in list_paths(pair.tree, level):
                k = pair.draws.get(path, 0)
                if k == 0:
                    continue
                columns = self.chances[level][find, scheme, k].T
                children = []
                for i, column in enumerate(columns):
                    child = (*path, i)
                    if child in below:
                        children.append(column * below[child])
                if children:
                    above[path] = combine_chances(
                        torch.stack(children), find is find_in_independent_draws
                    )
            below = above
        return below[()]


def list_paths(tree: StaticTree, depth: int) -> list[tuple[int, ...]]:
    """The paths of a depth."""
    return [path for path in tree.paths if len(path) == depth]


def combine_chances(chances: Tensor, are_independent: bool) -> Tensor:
    """[n] Pr(one of K events), whose chances are [K, n]. Events that are not independent exclude each other."""
    if not are_independent:
        return chances.sum(0)
    return -torch.log1p(-chances.clamp(max=1)).sum(0).expm1()


def count_fewest_cycles(limits: Array) -> float:
    """The fewest cycles, on average, in which a verifier may put out a text, whatever it knows of the text.

    limits: [n, D + 1], C at each of n places. With C_i - C_(i+1) at most i tokens can be kept. A verifier might keep
    fewer, to begin the next cycle where it goes on better:

        N_t = 1 + sum over i of (C_i - C_(i+1)) min over j <= i of N_(t+1+j)        behind the text N is 0
    """
    length, width = limits.shape
    shares = limits - np.pad(limits[:, 1:], ((0, 0), (0, 1)))
    cycles = np.zeros(length + width)
    for place in reversed(range(length)):
        after = np.minimum.accumulate(cycles[place + 1 : place + 1 + width])
        cycles[place] = 1 + shares[place] @ after
    return float(cycles[0])
