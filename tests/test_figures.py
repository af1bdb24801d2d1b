"""Figures of an evaluation: ratios, their intervals, and an order that favours nobody."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from evaluating import pair

from treespec.eval.contestants import Contestant, planned
from treespec.eval.figures import figures
from treespec.eval.intervals import interval, resample
from treespec.eval.questions import Question
from treespec.eval.verdict import noise_of, sentences


@pytest.mark.parametrize("count", [1, 7, 23])
def test_every_contestant_is_asked_every_question_once_and_batch_sizes_take_turns(count):
    questions = [Question(i, "c", ("?",)) for i in range(count)]
    chosen = [Contestant("topk", batch=batch, name=f"{name}{batch}") for batch in (1, 2, 3) for name in "ab"]
    plan = planned(questions, chosen, {("a1", 0)})
    asked = Counter((one.name, q.question_id) for group, one in plan for q in group)
    assert asked == Counter((one.name, i) for one in chosen for i in range(count) if (one.name, i) != ("a1", 0))
    assert max(len(group) for group, one in plan if one.batch == 1) == 1
    ends = {one.name: [q.question_id for group, o in plan if o == one for q in group] for one in chosen}
    assert all(own == sorted(own) for own in ends.values())


def answer(tokens, cycles, seconds, **stages):
    """A completion of one turn."""
    extra = {
        "seconds": {"target": seconds / 2, "total": seconds} | stages,
        "drafted": [],
        "accepted": [],
        "undrafted": 0,
    }
    return {"turns": [""], "cycles": [cycles], "new_tokens": [tokens], "wall": [seconds]} | extra


def test_figures_of_given_times():
    """Two questions alike: 12 tokens in 4 cycles of 10 ms after a prefill, against 12 cycles of 5 ms."""
    stages = {"draft": 0.012, "head": 0.008, "target": 0.024, "verify": 0.002, "commit": 0.001}
    mine = answer(12, 4, 0.060, prefill=0.020, **stages)
    plain = answer(12, 12, 0.080, prefill=0.020, target=0.048)
    got = figures([mine] * 2, [plain] * 2, resample(2, 50, 0))
    ms = {"draft model": 2, "rest of drafting": 1, "target": 6, "verify": 0.5, "commit": 0.25, "rest": 0.25}
    assert got["cycle_ms"] == pytest.approx(ms)
    values = {"decoding_speedup": 1.5, "bound": 3 * 4 / (6 + 2), "speedup": 80 / 60, "acceptance_length": 3}
    assert {name: got[name]["value"] for name in values} == pytest.approx(values)
    assert got["first_token"] == pytest.approx(0.03)


def test_ratio_of_totals_of_a_hand_example():
    # ours: 30 tokens in 3 s and 10 in 5 s, 40 in 8; the baseline: 20 in 4 s and 20 in 20 s, 40 in 24.
    mine, base = [answer(30, 10, 3.0), answer(10, 10, 5.0)], [answer(20, 20, 4.0), answer(20, 20, 20.0)]
    got = figures(mine, base, resample(2, 200, seed=0))
    assert got["tokens_per_second"]["value"] == pytest.approx(5)
    assert got["speedup"]["value"] == pytest.approx(5 / (40 / 24))  # 3
    assert got["acceptance_length"]["value"] == pytest.approx(2)
    # of two questions a resample has the first twice, both, or the second twice
    assert got["acceptance_length"] == pytest.approx({"value": 2, "low": 1, "high": 3})
    one = figures(mine[:1], base[:1], resample(1, 50, seed=0))
    assert one["speedup"] == {"value": pytest.approx(2), "low": None, "high": None}


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
    chosen = [Contestant("topk", name=name, again=name == "again") for name in answers]
    tokens = rng.integers(5, 100, questions)
    for [one], who in planned([Question(i, "c", ("?",)) for i in range(questions)], chosen, set()):
        count = int(tokens[one.question_id])
        seconds = clock.seconds(count, speedup if who.name == "pair" else 1.0)
        answers[who.name][one.question_id] = answer(count, count, seconds)
    figure = {}
    for name in ("again", "pair"):
        base = [answers["plain"][number] for number in answers[name]]
        draws = resample(len(base), 200, seed=0)
        figure[name] = figures(list(answers[name].values()), base, draws)["speedup"]
    return sentences([pair("pair", figure["pair"])], questions, noise_of(figure["again"]))


def test_a_busy_machine_makes_no_winner_and_hides_no_large_one():
    """500 A/A evaluations of 2 to 80 questions: 3 of 50 may name a winner, here 1 %; twice the speed is mostly seen."""
    rng = np.random.default_rng(0)
    verdicts = [measured(int(rng.integers(2, 81)), rng)[0] for _ in range(500)]
    assert sum("neither" not in line and "too few" not in line for line in verdicts) <= 5
    assert sum("these are faster" in measured(40, rng, 2.0)[0] for _ in range(50)) >= 25
