"""Convert the draws of each cycle to test statistics, such as their ranks in the reported draft distributions.

The scheme says which draws are random (`Scheme.random_draws`). Their distributions are computed here again,
independently of the scheme's code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treespec.eval.certify.statistics import compute_odds_stakes, compute_power_stakes
from treespec.trees.tree import Drafts, Draws
from treespec.verify.scheme import RandomDraws

DRAWS_QUESTION = "draws follow their reported distribution"
POWER_QUESTION = "draws are not from a power of it"
REPEATS_QUESTION = "draws do not repeat them more often, or less"
NO_NUMBERS = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class SampledCycle:
    """One cycle of one sequence.

    A rank is a number in [0, 1], uniform if a draw has its reported distribution (see `place_tokens`).

    Attributes:
        tokens: the n committed tokens.
        numbers: test name -> its statistics. `DRAWS_QUESTION`: [m] the rank of each draw of the tree, tokens ordered by
            q. `POWER_QUESTION`: [m, BET_POWERS] and `REPEATS_QUESTION`: [r, BET_ODDS] log growth of the bets.
        first: [I] the rank of the first draw at each inner node, tokens ordered by token id.
        root_q: [V] q at the root; None if the root has no draws.
    """

    tokens: list[int]
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    first: Tensor = NO_NUMBERS
    root_q: Tensor | None = None


def build_shown_cycle(
    tokens: list[int],
    drafts: Drafts | None,
    random_draws: RandomDraws | None,
    coins: torch.Generator,
) -> SampledCycle:
    """Compute the test statistics of a cycle's draws.

    Args:
        tokens: the tokens that the cycle committed.
        drafts: the draws of the cycle's tree; None if the cycle had no tree.
        random_draws: the scheme's `random_draws`.
        coins: generator of the ranks' random part.
    """
    if drafts is None:
        return SampledCycle(tokens)
    drafts = split_models(drafts)
    q, draws, is_first = gather_random_draws(random_draws, drafts)
    number = torch.arange(q.shape[-1], device=q.device).expand_as(q)
    first = place_tokens(q[is_first], number[is_first], draws[is_first], coins)
    numbers = {
        DRAWS_QUESTION: place_tokens(q, q, draws, coins),
        POWER_QUESTION: compute_power_stakes(q, draws).cpu(),
    }
    if random_draws == "independent":
        again, chance = find_repeats(drafts, coins)
        numbers[REPEATS_QUESTION] = compute_odds_stakes(again, chance).cpu()
    q_at_root = drafts.q[drafts.nodes == 0]
    root_q = q_at_root[0] if len(q_at_root) else None
    return SampledCycle(tokens, numbers, first, root_q)


def split_models(drafts: Drafts) -> Drafts:
    """Give each draft model a row of its own at each node where it has drawn; drafts of one model stay as they are."""
    if drafts.q.dim() == 2:
        return drafts
    models = drafts.q.shape[1]
    nodes = []
    qs = []
    tokens = []
    for model in range(models):
        model_tokens = drafts.draws.tokens[:, model::models]
        has_drawn = (model_tokens >= 0).any(1)
        nodes.append(drafts.nodes[has_drawn])
        qs.append(drafts.q[has_drawn, model])
        tokens.append(model_tokens[has_drawn])
    return Drafts(torch.cat(nodes), torch.cat(qs), Draws(torch.cat(tokens)))


def gather_random_draws(
    random_draws: RandomDraws | None, drafts: Drafts
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the m random draws of a tree; none if `random_draws` is None.

    Draws without replacement at a node, with q over five tokens; an earlier token has lost its mass:

        q                .4   .3   .2   .1   0         draw 1 is token 1
        q of draw 2      .4    0   .2   .1   0         not normalised

    Returns:
        The distribution of each draw [m, V], not normalised; its token [m]; whether it is the first random draw at its
        node, [m] bool.
    """
    # 1. The draws that are random, and the tokens that are certain.
    tokens = drafts.draws.tokens
    is_certain = mark_sure_tokens(drafts)
    is_present = tokens >= 0
    is_random = is_present & ~is_certain & bool(random_draws)
    if random_draws == "the last":
        is_random &= is_present.cumsum(1) == is_present.sum(1, keepdim=True)
        is_certain = is_present & ~is_random
    elif random_draws == "the first":
        is_random[:, 1:] = False

    # 2. The distribution of each draw, column by column: all nodes' first draws, then their second ones.
    remaining_q = drafts.q
    if bool(is_certain.any()):
        remaining_q = remove_tokens(remaining_q, tokens, is_certain)
    draw_qs = []
    is_first = (is_random.cumsum(1) == 1) & is_random
    for token, rows in zip(tokens.T, is_random.T, strict=True):
        draw_qs.append(remaining_q[rows])
        if random_draws == "without replacement":
            remaining_q = remove_tokens(remaining_q, token[:, None], rows[:, None])
    return torch.cat(draw_qs), tokens.T[is_random.T], is_first.T[is_random.T]


def find_repeats(drafts: Drafts, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Find which independent draws repeat an earlier draw of their node. A node's first draw is left out.

    The order of a node's draws may depend on the tokens, so the draws are shuffled first.

    Returns:
        For each of r draws whether it repeats an earlier one, [r] bool, and the probability of that, [r] float64.
    """
    # 1. The draws in random order.
    is_certain = mark_sure_tokens(drafts)
    q = remove_tokens(drafts.q, drafts.draws.tokens, is_certain)
    tokens = drafts.draws.tokens.masked_fill(is_certain, -1)
    shuffle = torch.rand(tokens.shape, generator=generator, dtype=torch.float32, device="cpu").to(
        q.device
    )
    tokens = tokens.gather(1, shuffle.masked_fill(tokens < 0, 2).argsort(dim=1))

    # 2. The mass of the distinct earlier tokens is a draw's probability of repeating one.
    again = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    mass = q.gather(1, tokens.clamp(min=0)) / q.sum(-1, keepdim=True, dtype=torch.float64)
    new_mass = mass.masked_fill(again | (tokens < 0), 0)
    mass_before = new_mass.cumsum(1) - new_mass
    is_present = tokens[:, 1:] >= 0
    return again[:, 1:][is_present], mass_before[:, 1:][is_present]


def mark_sure_tokens(drafts: Drafts) -> Tensor:
    """Mark the tokens that were certain, not drawn: [I, K] bool."""
    is_certain = drafts.draws.sure
    tokens = drafts.draws.tokens
    if is_certain is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return (tokens >= 0) & is_certain


def remove_tokens(q: Tensor, tokens: Tensor, is_removed: Tensor) -> Tensor:
    """Set the mass of the tokens [I, K] that are marked in `is_removed` [I, K] to 0; [I, V], not normalised."""
    return q.scatter_reduce(1, tokens.clamp(min=0), (~is_removed).to(q.dtype), "prod")


def place_tokens(p: Tensor, order: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the ranks of tokens in their distributions: uniform on [0, 1] if the tokens were drawn from them.

    A rank is the mass before the token in some order, plus a random part of the token's mass. Tokens of equal order
    count as one. Five tokens, the given one in brackets, a coin of .5:

        order           1    2   [3]   4    5
        probability    .1   .2   .4   .2   .1        rank .1 + .2 + .5 * .4 = .5

    Args:
        p: [n, V] probabilities; they need not sum to 1.
        order: [n, V] the sort key of each token.
        tokens: [n] int64.
        generator: draws the coins, on the CPU.

    Returns:
        [n] float64, on the CPU.

    Source: Rosenblatt 1952.
    """
    token_order = order.gather(1, tokens[:, None])
    mass_before = (p * (order < token_order)).sum(1, dtype=torch.float64).cpu()
    token_mass = (p * (order == token_order)).sum(1, dtype=torch.float64).cpu()
    coins = torch.rand(len(p), generator=generator, dtype=torch.float64, device="cpu")
    return (mass_before + coins * token_mass) / p.sum(1, dtype=torch.float64).cpu()
