"""One clock: by steps or by minutes, a run warms up, grows and decays at the same shares of its length."""

from dataclasses import replace

import pytest

from treespec.errors import InputError
from treespec.train.clock import FALLS, Clock, draft_steps_at, learning_rate
from treespec.train.config import TrainConfig
from treespec.train.kinds import forwards_of, recipe_of

KINDS = ("eagle", "eagle3", "medusa", "hydra", "hydra++")


def config(**options):
    return TrainConfig(target="target", data="data", out="out", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warm_up", [None, 7, 10**6])
def test_minutes_and_steps_of_the_same_run_give_the_same_rates(kind, warm_up):
    """1,000 steps of 0.6 s each, ended by steps, or by ten minutes of many more epochs."""
    options = config(head=kind, warm_up=warm_up)
    by_steps, by_minutes = Clock(1000), Clock(10**9, minutes=10)
    for step in range(1, 1000):
        seconds = 0.6 * step
        rate = learning_rate(options, by_steps, step, seconds)
        assert learning_rate(options, by_minutes, step, seconds) == pytest.approx(rate, rel=1e-6)
        grown = draft_steps_at(options, by_steps.behind(step, seconds))
        assert grown == draft_steps_at(options, by_minutes.behind(step, seconds))
    assert by_minutes.behind(1000, 600.0) == by_steps.behind(1000, 600.0) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_reaches_its_highest_rate_and_ends_at_its_last_whatever_ends_it(kind):
    """That ended by the clock EAGLE-3 never saw its rate, and stopped amid its decay."""
    options = config(head=kind)
    recipe = recipe_of(options)
    for clock in (Clock(1000), Clock(10**9, minutes=10)):
        rates = [learning_rate(options, clock, step, 0.6 * step) for step in range(1000)]
        assert max(rates) == pytest.approx(recipe.learning_rate, rel=1e-2)
        assert rates.index(max(rates)) <= 101
        assert rates[-1] == pytest.approx(recipe.learning_rate * recipe.last_rate, abs=2e-3 * recipe.learning_rate)


def test_the_decays_fall_from_one_to_nothing():
    for fall in FALLS.values():
        shares = [fall(step / 100) for step in range(101)]
        assert shares[0] == 1
        assert shares[-1] == pytest.approx(0)
        assert shares == sorted(shares, reverse=True)
    assert FALLS["cosine"](0.5) == pytest.approx(0.5)


def test_medusa_and_hydra_plus_are_trained_as_published():
    """The commands in the README.md of FasterDecoding/Medusa and zankner/Hydra."""
    medusa, plus = recipe_of(config(head="medusa")), recipe_of(config(head="hydra++"))
    assert (medusa.weight_decay, medusa.warm_up, medusa.decay, medusa.last_rate) == (0.0, None, "cosine", 0.0)
    assert (plus.weight_decay, plus.warm_up, plus.decay, plus.last_rate) == (0.1, 100, "cosine", 0.33)
    assert (medusa.batch, plus.batch, plus.dropout) == (128, 32, 0.2)
    assert (medusa.clip, medusa.beta2) == (plus.clip, plus.beta2) == (1.0, 0.999)


def test_a_step_has_the_recipes_batch_in_any_number_of_processes():
    for kind, batch in (("medusa", 128), ("hydra++", 32)):
        for size, processes in ((4, 1), (4, 8), (8, 4), (1, 2)):
            assert forwards_of(config(head=kind, batch_size=size), processes) * size * processes == batch
    assert forwards_of(config(batch_size=2), 3) == 1
    assert forwards_of(config(head="medusa", accumulate=5), 3) == 5


@pytest.mark.parametrize(
    ("name", "value"), [("grow_at", 1.0), ("last_rate", 1.5), ("dropout", 1.0), ("decay", "square"), ("patience", -1)]
)
def test_a_schedule_that_cannot_be_is_one_line(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is .*must be") as told:
        replace(config(), **{name: value})
    assert "\n" not in str(told.value)
