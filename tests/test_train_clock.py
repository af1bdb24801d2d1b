"""One clock: by steps or by minutes, a run warms up, grows and decays at the same shares of its length."""

import pytest

from treespec.train.config import TrainConfig
from treespec.train.loop.steps import Clock, draft_steps_at, learning_rate

KINDS = ("eagle", "eagle3", "medusa", "hydra", "hydra++")


def config(**options):
    return TrainConfig(target="target", data="data", out="out", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warm_up", [None, 7, 10**6])
def test_minutes_and_steps_of_the_same_run_give_the_same_rates(kind, warm_up):
    """1,000 steps of 0.6 s, ended by steps or by ten minutes: the highest rate is reached, the last is the recipe's."""
    recipe, rates = config(head=kind, warm_up=warm_up).recipe, []
    by_steps, by_minutes = Clock(1000), Clock(10**9, minutes=10)
    for step in range(1, 1000):
        seconds = 0.6 * step
        rates.append(learning_rate(recipe, by_steps, step, seconds))
        assert learning_rate(recipe, by_minutes, step, seconds) == pytest.approx(rates[-1], rel=1e-6)
        grown = draft_steps_at(recipe, by_steps.behind(step, seconds))
        assert grown == draft_steps_at(recipe, by_minutes.behind(step, seconds))
    assert by_minutes.behind(1000, 600.0) == by_steps.behind(1000, 600.0) == 1
    if warm_up is None:
        assert max(rates) == pytest.approx(recipe.learning_rate, rel=1e-2)
        assert rates.index(max(rates)) <= 101
        assert rates[-1] == pytest.approx(recipe.learning_rate * recipe.last_rate, abs=2e-3 * recipe.learning_rate)


def test_a_step_has_the_recipes_batch_in_any_number_of_processes():
    for kind, batch in (("medusa", 128), ("hydra++", 32)):
        for size, processes in ((4, 1), (4, 8), (8, 4), (1, 2)):
            assert config(head=kind, batch_size=size).forwards(processes) * size * processes == batch
    assert config(batch_size=2).forwards(3) == 1
    assert config(head="medusa", accumulate=5).forwards(3) == 5
