"""A head's calibration: fitted to what the target accepts, saved and read as it is, and what nodes cost by it."""

import math

import numpy as np
import pytest
import torch
from commands import complains
from drafters import RATES_BY_TEMPERATURE, USUAL_CALIBRATION
from models import TableConfig, TableModel, close, random_head, seeded
from reference import to_probs
from training import change_json

from treespec.api.calibrate import SHARPNESS_FACTORS, calibrate, fit_logistic, fit_sharpness, measure_draw_rates
from treespec.api.spec import Spec
from treespec.draft.calibration import (
    CALIBRATION_FILE,
    Calibration,
    build_calibration_features,
    load_calibration,
    save_calibration,
)
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.loading import roll_out_drafts
from treespec.draft.models.model import ModelProposer
from treespec.model.target import Target


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(4, seed=1)))
    return model, random_head(model, seed=2)


def test_a_calibration_is_read_as_it_was_saved(tmp_path):
    weights = torch.randn(4, generator=seeded(6), dtype=torch.float64).tolist()
    calibration = Calibration(tuple(weights), RATES_BY_TEMPERATURE, (1.4, 1.2))
    assert load_calibration(tmp_path) is None
    save_calibration(calibration, tmp_path)
    assert load_calibration(tmp_path) == calibration
    assert [file.name for file in tmp_path.iterdir()] == [CALIBRATION_FILE]


@pytest.mark.parametrize(
    "damage",
    [
        *({"greedy": None}, {"format": None}, {"greedy": [1.0]}, {"format": 1}, {"greedy": [math.nan] * 4}),
        *({"rates": {"1": [math.inf]}}, {"rates": {"warm": [0.1]}}, {"rates": {"1": 0.1}}, {"rates": {"1": []}}),
        *({"sharpness": [1.0, 0.0]}, {"sharpness": [math.nan]}, {"sharpness": None}),
    ],
)
def test_a_damaged_calibration_is_refused_with_a_remedy(tmp_path, damage):
    """Files that hold no JSON: test_damage.py."""
    save_calibration(USUAL_CALIBRATION, tmp_path)
    change_json(tmp_path, CALIBRATION_FILE, checksum=None, **damage)
    with complains("treespec calibrate"):
        load_calibration(tmp_path)


def test_a_logistic_regression_recovers_its_weights():
    """Of exact shares to 1e-4; of coins to 4 standard errors."""
    generator = seeded(7)
    x = torch.randn(8000, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 1
    wanted = to_probs([-1.0, 2.0, 0.5])
    weight = torch.rand(8000, generator=generator)
    shares = torch.sigmoid(x @ wanted)
    close(fit_logistic(x, shares, weight), wanted, 1e-4)
    coins = torch.rand(8000, generator=generator) < shares
    information = (x.T * (shares * (1 - shares))) @ x
    error = information.inverse().diagonal().sqrt()
    assert ((fit_logistic(x, coins, torch.ones(8000)) - wanted).abs() < 4 * error).all()


def rows_of(model, lengths, counted=True):
    generator = seeded(8)
    texts = [torch.randint(4, (length,), generator=generator) for length in lengths]
    return [
        (text, torch.full_like(text, counted, dtype=torch.bool), model.compute_features(text[None])[0])
        for text in texts
    ]


def test_calibrating_gives_finite_weights_and_rates_at_each_temperature(table):
    model, head = table
    found = calibrate(head, model, rows_of(model, [60, 4, 40]), depth=3, positions=60)
    assert len(found.greedy) == 4
    assert [*found.rates] == ["0.01", "0.3", "0.6", "1"]
    for rates in found.rates.values():
        assert rates[0] > 0
        assert sum(rates) <= 1


def test_each_draft_step_gets_the_factor_with_most_acceptances(table):
    """Against the acceptance rates along every text, position by position."""
    model, head = table
    rows = rows_of(model, [60, 40])
    found = fit_sharpness(head, model, rows, 2, 1000)
    for step, chosen in enumerate(found):
        rates = dict.fromkeys(SHARPNESS_FACTORS, 0.0)
        for tokens, _, features in rows:
            own = model.compute_output_logits(features)
            drafted = [*roll_out_drafts(head, model, tokens, features, 2)][step]
            for at in range(0, len(drafted), 3):  # one in three counts, as for the two models
                for factor in rates:
                    for t in (0.3, 0.6, 1.0):
                        p = (own[at + step + 1] / t).softmax(-1)
                        q = (drafted[at] * factor / t).softmax(-1)
                        rates[factor] += float(torch.minimum(p, q).sum())
        assert rates[chosen] > max(rates.values()) - 1e-4


def test_drafts_are_drawn_from_the_sharpened_distributions(table):
    """Of both levels of a chain, to 1e-5; and the rollout says the same."""
    model, head = table
    calibration = Calibration(sharpness=(1.5, 0.7))
    seen = []
    spec = Spec(model, head, "chain:2", "rrs", calibration=calibration)
    request = spec.request([1, 2, 3], seed=1, temperature=0.5, max_new_tokens=2)
    request.listener = seen.append
    list(spec.decoder.run([request]))
    tree = seen[0].tree
    text = torch.tensor([1, 2, 3, *tree.tokens[1:].tolist()])
    features = model.compute_features(text[None])[0]
    for step, factor in enumerate((1.5, 0.7)):
        plain, sharp = ([*roll_out_drafts(head, model, text, features, 2, s)][step] for s in ((), (1.5, 0.7)))
        close(sharp, plain * factor, 1e-6)
        close(tree.drafts.q[step], (sharp[1] / 0.5).softmax(-1), 1e-5)


def test_drafts_of_the_target_itself_are_always_accepted():
    model = Target(TableModel(TableConfig(6, seed=1)))
    for temperature in (0.0, 1.0):
        rates = measure_draw_rates(model, ModelProposer(model, model), [[1, 2], [3]], temperature, tokens=30)
        assert rates == (1.0,)  # no other draw is ever judged


def test_rates_are_counted_by_draw_and_never_sum_to_more_than_one(table):
    model, head = table
    for temperature in (0.0, 0.6, 1.0):
        rates = measure_draw_rates(model, EagleProposer(head, model), [[1, 2], [3]], temperature, tokens=40)
        assert 0 < rates[0] < 1
        assert len(rates) > 1
        assert sum(rates) <= 1 + 1e-9


@pytest.mark.parametrize("lengths, counted", [([], True), ([5, 3], True), ([40], False)])
def test_too_little_text_to_calibrate_is_refused(table, lengths, counted):
    model, head = table
    with complains("too short"):
        calibrate(head, model, rows_of(model, lengths, counted), depth=3)


def test_the_predicted_choices_are_those_of_the_logistic_model():
    """Against the sigmoid of features times weights, shares of at most 1; 5 nodes of 4 children each."""
    random = np.random.default_rng(0)
    calibration = Calibration(greedy=(0.3, 1.1, -0.8, -0.2))
    top = np.sort(random.dirichlet(np.ones(6), 5), 1)[:, :1:-1]  # [5, 4]
    top[0, 0] = 1.0
    for depth in range(3):
        logits = build_calibration_features(top, depth) @ np.array(calibration.greedy)
        wanted = 1 / (1 + np.exp(-logits))
        wanted /= np.maximum(wanted.sum(1, keepdims=True), 1)
        for row, probabilities in zip(top.tolist(), wanted.tolist(), strict=True):
            assert calibration.predict_certain_choice(row, depth) == pytest.approx(probabilities, rel=1e-12)
