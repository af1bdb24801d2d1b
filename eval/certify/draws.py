"""The draws of each cycle as numbers: their places in the distributions that they are said to come from.

The scheme says which draws are random (`Scheme.random_draws`); their distributions are computed here
once more, apart from its code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treespec.eval.certify.statistics import compute_odds_stakes, compute_power_stakes
from treespec.trees.tree import Drafts
from treespec.verify.scheme import RandomDraws

DRAWS_QUESTION = "draws follow their reported distribution"
POWER_QUESTION = "draws are not from a power of it"
REPEATS_QUESTION = "draws do not repeat them more often, or less"
NO_NUMBERS = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class SampledCycle:
    """One cycle of one sequence. Places are numbers in [0, 1], uniform if draws have their distribution.

    tokens: the n committed tokens.
    numbers: by question: of `DRAWS_QUESTION` [m] the place of each draw of the tree, tokens ordered by q; of
    `POWER_QUESTION` [m, POWERS] and of `REPEATS_QUESTION` [r, ODDS] bets.
    first: [I] the place of the first draw at each inner node, tokens ordered by number.
    root_q: [V] q at the root; None where the root has no draws.
    """

    tokens: list[int]
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    first: Tensor = NO_NUMBERS
    root_q: Tensor | None = None


def build_shown_cycle(
    tokens: list[int], drafts: Drafts | None, how: RandomDraws | None, coins: torch.Generator
) -> SampledCycle:
    """Compute what a cycle shows of its draws.

    Args:
        tokens: those that the cycle committed.
        drafts: those of its tree; None without a tree.
        how: the scheme's `random_draws`.
        coins: generator of the coins inside a token's own mass.
    """
    if drafts is None:
        return SampledCycle(tokens)
    q, draws, is_first = gather_random_draws(how, drafts)
    number = torch.arange(q.shape[-1], device=q.device).expand_as(q)
    first = place_tokens(q[is_first], number[is_first], draws[is_first], coins)
    numbers = {
        DRAWS_QUESTION: place_tokens(q, q, draws, coins),
        POWER_QUESTION: compute_power_stakes(q, draws).cpu(),
    }
    if how == "independent":
        repeated, chance = find_repeats(drafts, coins)
        numbers[REPEATS_QUESTION] = compute_odds_stakes(repeated, chance).cpu()
    at_root = drafts.q[drafts.nodes == 0]
    root_q = at_root[0] if len(at_root) else None
    return SampledCycle(tokens, numbers, first, root_q)


def gather_random_draws(how: RandomDraws | None, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the m random draws of a tree; none if `how` is None.

    Returns the distribution of each [m, V], not normalised, its token [m], and whether it is the
    first at its node, [m] bool.
    """
    # 1. Which draws are random, and which tokens are sure.
    tokens = drafts.draws.tokens
    sure = mark_sure_tokens(drafts)
    present = tokens >= 0
    random = present & ~sure & bool(how)
    if how == "the last":
        random &= present.cumsum(1) == present.sum(1, keepdim=True)
        sure = present & ~random
    elif how == "the first":
        random[:, 1:] = False

    # 2. The distribution of the next draw at each node, a column of draws at a time.
    left = drafts.q
    if bool(sure.any()):
        left = remove_tokens(left, tokens, sure)
    found = []
    is_first = (random.cumsum(1) == 1) & random
    for token, rows in zip(tokens.T, random.T, strict=True):
        found.append(left[rows])
        if how == "without replacement":
            left = remove_tokens(left, token[:, None], rows[:, None])
    return torch.cat(found), tokens.T[random.T], is_first.T[random.T]


def find_repeats(drafts: Drafts, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Find which of the independent draws of a node repeat one another, but for each node's first.

    Returns for r draws: whether each repeats an earlier one of its node, and the probability of that.
    The order of a node's draws may depend on its tokens, so they are taken in a random one.
    """
    # 1. The draws, in an order that their tokens do not decide.
    sure = mark_sure_tokens(drafts)
    q = remove_tokens(drafts.q, drafts.draws.tokens, sure)
    tokens = drafts.draws.tokens.masked_fill(sure, -1)
    shuffle = torch.rand(tokens.shape, generator=generator).to(q.device)
    tokens = tokens.gather(1, shuffle.masked_fill(tokens < 0, 2).argsort(dim=1))

    # 2. The mass of the distinct tokens before each draw: its probability to repeat one.
    again = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    mass = q.gather(1, tokens.clamp(min=0)) / q.sum(-1, keepdim=True, dtype=torch.float64)
    share = mass.masked_fill(again | (tokens < 0), 0)
    before = share.cumsum(1) - share
    present = tokens[:, 1:] >= 0
    return again[:, 1:][present], before[:, 1:][present]


def mark_sure_tokens(drafts: Drafts) -> Tensor:
    """[I, K] bool: whether a token is sure, not drawn."""
    sure = drafts.draws.sure
    tokens = drafts.draws.tokens
    if sure is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return (tokens >= 0) & sure


def remove_tokens(q: Tensor, tokens: Tensor, gone: Tensor) -> Tensor:
    """[I, V] the distribution without the mass of the tokens [I, K] that are `gone` [I, K]."""
    return q.scatter_reduce(1, tokens.clamp(min=0), (~gone).to(q.dtype), "prod")


def place_tokens(p: Tensor, order: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the places [n] float64 of tokens in their distributions, on the host: uniform if drawn from them.

    A place is the mass before the token in an order, plus a random part of its own mass. Tokens
    of equal order count as one. Five tokens, the chosen one in brackets, a coin of .5:

        order           1    2   [3]   4    5
        probability    .1   .2   .4   .2   .1        place .1 + .2 + .5 * .4 = .5

    p, order: [n, V]; the probabilities need not sum to 1. chosen: [n] int64. generator: for the
    coins, on the host.
    """
    at = order.gather(1, chosen[:, None])
    before = (p * (order < at)).sum(1, dtype=torch.float64).cpu()
    same = (p * (order == at)).sum(1, dtype=torch.float64).cpu()
    coins = torch.rand(len(p), generator=generator, dtype=torch.float64)
    return (before + coins * same) / p.sum(1, dtype=torch.float64).cpu()
