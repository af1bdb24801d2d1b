"""One clock: by steps or by minutes, a run warms up, grows and decays at the same shares of its length."""

import pytest
from training import options

from treespec.train.loop.steps import Clock, draft_steps_at, learning_rate

PUBLISHED = {  # of Medusa and Hydra++ the commands in the README.md of FasterDecoding/Medusa and zankner/Hydra
    "eagle": {"learning_rate": 3e-5, "warm_up": 2000, "clip": 0.5, "beta2": 0.95},
    "eagle3": {"learning_rate": 5e-5, "epochs": 40, "warm_up": 12000, "weight_decay": 0.0},
    "medusa": {
        "learning_rate": 1e-3,
        "epochs": 2,
        "weight_decay": 0.0,
        "decay": "cosine",
        "batch": 128,
        "beta2": 0.999,
    },
    "hydra": {"learning_rate": 5e-4, "epochs": 10},
    "hydra++": {"learning_rate": 5e-4, "epochs": 10, "weight_decay": 0.1, "warm_up": 100, "decay": "cosine"}
    | {"batch": 32, "clip": 1.0, "beta2": 0.999, "last_rate": 0.33, "dropout": 0.2},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_kind_has_its_published_recipe_where_nothing_is_said(kind):
    assert PUBLISHED[kind].items() <= vars(options(head=kind).recipe).items()
    assert options(head=kind, learning_rate=0.0).recipe.learning_rate == 0.0


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("warm_up", [None, 7, 10**6])
def test_minutes_and_steps_of_the_same_run_give_the_same_rates(kind, warm_up):
    """1,000 steps of 0.6 s, ended by steps or by ten minutes: the highest rate is reached, the last is the recipe's."""
    recipe, rates = options(head=kind, warm_up=warm_up).recipe, []
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
            assert options(head=kind, batch_size=size).forwards(processes) * size * processes == batch
    assert options(batch_size=2).forwards(3) == 1
    assert options(head="medusa", accumulate=5).forwards(3) == 5
