"""Bets against a law: sharp p-values where the likely faults of a law are known.

A bet on another law multiplies its stake by Pr(the event) under that law, divided by Pr(the event)
under the law in question. If the law in question holds, the stake is a martingale: it reaches 1 / p
with probability at most p (Ville 1939), even where each event depends on the events before it.
"""

import math

import torch
from torch import Tensor

ODDS = (0.01, 0.5, 2.0)  # factors on the odds that a draw repeats another one
POWERS = (0.5, 0.95, 1.05, 2.0)  # powers of the law of a draw: hotter below 1, colder above


def lost(bets: Tensor) -> float:
    """p-value of A bets that share one stake evenly. bets: [n, A] log growth by event and bet."""
    if not len(bets):
        return 1.0
    stake = bets.double().sum(0).logsumexp(0) - math.log(bets.shape[1])
    return math.exp(min(0.0, -float(stake)))


def on_odds(happened: Tensor, chance: Tensor) -> Tensor:
    """[n, ODDS] bets that events have other odds. happened: [n] bool; chance: [n] probabilities."""
    chance, odds = chance.double()[:, None], chance.new_tensor(ODDS).double()
    return odds.log() * happened[:, None] - (1 - chance + odds * chance).log()


def on_powers(laws: Tensor, tokens: Tensor) -> Tensor:
    """[n, POWERS] bets that tokens come from a power of their law.

    laws: [n, V], not normalised. tokens: [n] int64.
    """
    logs = laws.log()
    own = logs.gather(1, tokens[:, None]).double()
    powers = own.new_tensor(POWERS)
    sums = [(power * logs).exp().sum(1, dtype=torch.float64) for power in (1.0, *POWERS)]
    whole, *others = torch.stack(sums, dim=1).log().split(1, dim=1)
    return (powers - 1) * own + whole - torch.cat(others, dim=1)
