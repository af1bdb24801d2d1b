"""The statistics of a certificate have the error that they state on exact texts, and the power."""

import pytest
import torch
from models import rand, randn, seeded, zeros
from scipy.stats import binom

from treespec.eval.certify.draws import find_repeats, gather_random_draws, place_tokens
from treespec.eval.certify.ranks import match_successive
from treespec.eval.certify.statistics import (
    BET_ODDS,
    BET_POWERS,
    compute_bet_p_value,
    compute_exchangeable_p_value,
    compute_independence_p_value,
    compute_odds_stakes,
    compute_power_stakes,
    compute_uniform_p_value,
    find_least_correlation,
)
from treespec.trees.tree import Drafts
from treespec.verify.registry import SCHEMES

ROUNDS = 200
ERROR = 0.05


def texts(generator, number, length=20, vocabulary=4, sharp=2.0):
    """Places of the tokens [number, length] of a Markov chain, in the orders of p and of the tokens' numbers, and its
    tokens' ranks, which hang together along a text."""
    table = (sharp * randn(vocabulary, vocabulary, generator=seeded(0))).softmax(-1)
    last = torch.zeros(number, dtype=torch.int64)
    columns = []
    for _ in range(length):
        p = table[last]
        token = p.multinomial(1, generator=generator)
        order = torch.arange(vocabulary).expand_as(p)
        ranked = token[:, 0] / vocabulary + 0.1
        columns.append(torch.stack([*(place_tokens(p, by, token[:, 0], generator) for by in (p, order)), ranked]))
        last = token[:, 0]
    return torch.stack(columns, dim=2)  # [3, number, length]


def test_exact_texts_fail_as_often_as_stated():
    """200 exact runs: the failures of each statistic at 5 % lie within 1e-4 of their binomial distribution's ends."""
    generator = seeded(1)
    failures = zeros(3)
    for _ in range(ROUNDS):
        by_p, by_number, ranks = texts(generator, 24)
        failures[0] += compute_uniform_p_value(by_p.flatten()) < ERROR
        failures[1] += compute_independence_p_value(torch.cat([match_successive(row) for row in by_number])) < ERROR
        failures[2] += compute_exchangeable_p_value(ranks.split(12), ERROR)[0] < ERROR
    low, high = binom.ppf([1e-4, 1 - 1e-4], ROUNDS, ERROR)
    assert ((failures >= low) & (failures <= high)).all(), failures


def test_the_stated_correlation_is_found():
    """If a share of the pairs holds one number twice, that share is the correlation."""
    n = 400
    error = 1e-3
    share = find_least_correlation(n, error)
    generator = seeded(1)
    pairs = rand(300, n, 2, generator=generator)
    same = rand(300, n, generator=generator) < share
    pairs[..., 1] = torch.where(same, pairs[..., 0], pairs[..., 1])
    assert sum(compute_independence_p_value(row) < error for row in pairs) >= 290


def bets(generator, odds=1.0, power=1.0, runs=2000, n=60):
    """p-values of events with other odds than told, and of tokens from a power of the distribution that is told.

    How likely an event is depends on whether the one before it happened.
    """
    chance = torch.tensor([0.1, 0.3], dtype=torch.float32)
    by_odds = []
    by_power = []
    distribution = randn(8, generator=seeded(0)).softmax(-1)
    for _ in range(runs):
        uniforms = rand(n, generator=generator).tolist()
        happened = [0]
        for number in uniforms:
            told = float(chance[happened[-1]])
            happened.append(int(number < odds * told / (1 - told + odds * told)))
        events = torch.tensor(happened)
        by_odds.append(compute_bet_p_value(compute_odds_stakes(events[1:] > 0, chance[events[:-1]])))
        tokens = (distribution**power).multinomial(n, replacement=True, generator=generator)
        by_power.append(compute_bet_p_value(compute_power_stakes(distribution.expand(n, -1), tokens)))
    return torch.tensor([by_odds, by_power])


def test_bets_against_a_distribution_that_holds_are_lost():
    """Of 2,000 exact runs no more than stated win, by the ends of a binomial distribution at 1e-4."""
    found = bets(seeded(1))
    for error in (0.05, 0.01):
        assert ((found < error).sum(1) <= binom.isf(1e-4, 2000, error)).all()


def test_a_token_of_probability_0_is_a_bet_won():
    distribution = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float32)
    assert compute_bet_p_value(compute_power_stakes(distribution, torch.tensor([2]))) == 0
    assert compute_power_stakes(distribution[:0], torch.tensor([], dtype=torch.int64)).shape == (0, len(BET_POWERS))
    assert compute_bet_p_value(compute_odds_stakes(torch.zeros(0, dtype=torch.bool), torch.zeros(0))) == 1
    assert compute_bet_p_value(torch.full((1000, 2), -1.0)) == 1  # a stake of e^-1000
    assert compute_odds_stakes(torch.tensor([True]), torch.tensor([1.0], dtype=torch.float32)).exp().tolist() == [
        pytest.approx([1.0] * len(BET_ODDS))
    ]


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.deterministic])
def test_the_draws_of_every_scheme_follow_their_documented_distribution(name):
    """And repeat one another as often as they should: an error of 1e-4 each."""
    generator = seeded(3)
    q = (1.5 * randn(1500, 6, generator=generator)).softmax(-1)
    draws = SCHEMES[name].draw(q, min(3, SCHEMES[name].max_draws or 3), generator)
    drafts = Drafts(torch.arange(len(q)), q, draws)
    distributions, tokens, is_first = gather_random_draws(SCHEMES[name].random_draws, drafts)
    assert is_first.sum() == len(q)
    assert compute_uniform_p_value(place_tokens(distributions, distributions, tokens, generator)) > 1e-4
    if name in ("rrs", "kseq", "optimal"):
        assert compute_bet_p_value(compute_odds_stakes(*find_repeats(drafts, generator))) > 1e-4
    assert compute_bet_p_value(compute_power_stakes(distributions, tokens)) > 1e-4
