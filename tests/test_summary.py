"""Figures of an evaluation: ratios, their intervals, and an order that favours nobody."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from treespec.eval.bootstrap import interval, resample
from treespec.eval.common import in_order
from treespec.eval.mtbench.answers import Answer
from treespec.eval.mtbench.config import EvalConfig, configurations
from treespec.eval.mtbench.run import asked_again
from treespec.eval.mtbench.summary import figures
from treespec.eval.verdict import MeasuredPair, noise_of, sentences


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8])
def test_each_configuration_runs_equally_often_at_each_place_and_after_each_other(n):
    chosen = configurations(
        EvalConfig(target="t", out="o", head="h", temperature=",".join(map(str, range(n))), baseline=False)
    )
    rounds = n if n % 2 == 0 else 2 * n
    orders = [in_order(chosen, number) for number in range(rounds)]
    assert all(sorted(map(hash, order)) == sorted(map(hash, chosen)) for order in orders)
    places = Counter((place, c) for order in orders for place, c in enumerate(order))
    assert set(places.values()) == {rounds // n}
    assert len(places) == n * n
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) == {rounds // n}
    assert len(pairs) == n * (n - 1)


def answer(tokens, cycles, seconds):
    extra = {"seconds": {"target": seconds / 2}, "drafted": [], "accepted": [], "ended": [], "token_ids": []}
    return Answer(1, "c", "m", [""], [cycles], [tokens], [seconds], [], extra)


def test_ratio_of_totals_and_mean_of_ratios_of_a_hand_example():
    # ours: 30 tokens in 3 s and 10 in 5 s, 40 in 8; the baseline: 20 in 4 s and 20 in 20 s, 40 in 24.
    mine, base = [answer(30, 10, 3.0), answer(10, 10, 5.0)], [answer(20, 20, 4.0), answer(20, 20, 20.0)]
    got = figures(mine, base, resample(2, 200, seed=0))
    assert got["tokens_per_second"]["value"] == pytest.approx(5)
    assert got["speedup"]["value"] == pytest.approx(5 / (40 / 24))  # 3
    assert got["speedup_by_question"]["value"] == pytest.approx((10 / 5 + 2 / 1) / 2)  # 2
    assert got["acceptance_length"]["value"] == pytest.approx(2)
    assert got["overhead"] == pytest.approx(0.5)
    # of two questions a resample has the first twice, both, or the second twice
    assert got["acceptance_length"]["low"] == pytest.approx(1)
    assert got["acceptance_length"]["high"] == pytest.approx(3)


def test_the_interval_of_a_ratio_covers_the_truth():
    """200 experiments of 40 questions whose rate varies by question.

    A 95 % percentile interval over 40 clusters covers 92 % (over 3000 such experiments); then fewer than 172 of
    200 have probability 0.002, and if it covered 95 %, more than 198 would have 0.0004. An interval that took
    tokens for independent covers 24 %.
    """
    experiments, questions, truth = 200, 40, 3.0
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(experiments):
        cycles = rng.integers(20, 200, questions)
        rates = rng.gamma(9.0, truth / 9.0, questions)  # mean 3, by question
        tokens = rng.poisson(rates * cycles)
        draws = resample(questions, 400, seed=int(rng.integers(1 << 30)))
        got = interval((draws @ tokens) / (draws @ cycles))
        covered += got["low"] <= truth <= got["high"]
        spread = 1.96 * np.sqrt(tokens.sum()) / cycles.sum()
        naive += abs(got["value"] - truth) <= spread
    assert 172 <= covered <= 198
    assert naive < 120


@dataclass
class BusyClock:
    """A machine whose speed drifts by tens of percent, jitters, and now and then stalls for an answer."""

    rng: np.random.Generator
    drift: float = 0.0

    def seconds(self, tokens, speedup=1.0):
        self.drift = 0.95 * self.drift + self.rng.normal(0, 0.05)
        stall = self.rng.uniform(1.5, 4) if self.rng.random() < 0.05 else 1.0
        return tokens / speedup * np.exp(self.drift + self.rng.normal(0, 0.05)) * stall


def measured(questions, rng, speedup=1.0):
    """The verdict on plain decoding, plain decoding again, and a pair that is `speedup` times as fast."""
    clock, answers = BusyClock(rng), {name: {} for name in ("plain", "again", "pair")}
    for number in range(questions):
        tokens = int(rng.integers(5, 100))
        for name in in_order(list(answers), number):
            if name != "again" or number in asked_again(questions):
                seconds = clock.seconds(tokens, speedup if name == "pair" else 1.0)
                answers[name][number] = answer(tokens, tokens, seconds)
    figure = {}
    for name in ("again", "pair"):
        base = [answers["plain"][number] for number in answers[name]]
        draws = resample(len(base), 200, seed=0)
        figure[name] = figures(list(answers[name].values()), base, draws)["speedup"]
    pair = MeasuredPair("pair", 0.0, 1.0, figure["pair"], tau=2.0)
    return sentences([pair], questions, {0.0: noise_of(figure["again"])})


def test_a_busy_machine_makes_no_winner_and_hides_no_large_one():
    """500 A/A evaluations of 2 to 80 questions: 3 of 50 may name a winner, here 1 %; twice the speed is mostly seen."""
    rng = np.random.default_rng(0)
    verdicts = [measured(int(rng.integers(2, 81)), rng)[0] for _ in range(500)]
    assert sum("neither" not in line and "too few" not in line for line in verdicts) <= 5
    assert sum("fastest is pair" in measured(40, rng, 2.0)[0] for _ in range(50)) >= 25


def test_one_question_has_no_interval():
    got = figures([answer(30, 10, 3.0)], [answer(20, 20, 4.0)], resample(1, 50, seed=0))
    assert got["speedup"] == {"value": pytest.approx(2), "low": None, "high": None}
