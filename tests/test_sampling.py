"""Logits to probabilities as transformers does it, and draws that follow a distribution."""

import pytest
import torch
import transformers as hf
from models import close, ones, rand, randn, seeded
from scipy.stats import chi2

from treespec.sampling import probs as sampling
from treespec.sampling.probs import SamplingParams, choose_greedy, compute_probs, invert, sample, select_topk

ERROR = 1e-4  # probability that a χ² test of this file fails by chance


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7),
        SamplingParams(1.0, top_k=5),
        SamplingParams(1.3, top_p=0.8),
        SamplingParams(1.0, min_p=0.1),
        SamplingParams(0.9, top_k=12, top_p=0.85, min_p=0.05),
    ],
)
def test_probs_equal_transformers_warpers(params):
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    logits = 3 * randn(50, 40, generator=seeded(0))
    wanted = warpers(torch.zeros(50, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    ours = compute_probs(logits, params)
    assert torch.equal(ours > 0, wanted > 0)
    close(ours, wanted, 1e-6)


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-46, 1e-40, 1e-12, 9e-6])
def test_a_tiny_temperature_is_0_and_one_hot(temperature):
    """Divided by it, logits are infinite."""
    logits = randn(9, 30, generator=seeded(0))
    params = SamplingParams(temperature)
    assert params.greedy
    assert torch.equal(compute_probs(logits, params), torch.nn.functional.one_hot(choose_greedy(logits), 30).float())


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e5, 1e30])
@pytest.mark.parametrize("scale", [1e-3, 10.0, 1e4])
def test_extreme_temperatures_give_distributions(temperature, scale):
    logits = scale * randn(9, 30, generator=seeded(0))
    logits[:, 3] = -torch.inf
    distribution = compute_probs(logits, SamplingParams(temperature))
    assert torch.allclose(distribution.sum(-1), ones(9))
    assert (distribution[:, 3] == 0).all()


def test_sample_follows_the_distribution_and_never_draws_mass_0():
    distribution = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float32)
    drawn = sample(distribution.expand(20000, 6) * 7, seeded(0)).bincount(minlength=6)
    assert drawn[distribution == 0].sum() == 0
    expected = 20000 * distribution[distribution > 0]
    assert float(((drawn[distribution > 0] - expected) ** 2 / expected).sum()) < chi2.isf(ERROR, 2)


def test_inverted_shares_are_tokens_with_mass():
    """At the ends of the shares, too; rows of zeros or NaN have no token, which is V."""
    masses = rand(20, 300, generator=seeded(0)) * (rand(300, generator=seeded(1)) > 0.4)
    masses[:, 150] += 1
    uniform = torch.rand(20, 50, generator=seeded(2), dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0, 1 - 2**-53
    assert (masses.gather(1, invert(masses, uniform)) > 0).all()
    for nothing in (0.0, torch.nan):
        assert (invert(torch.full((1, 300), nothing), uniform[:1]) == 300).all()


@pytest.mark.parametrize("few", [0, sampling.ONE_PASS_NUMBERS])
@pytest.mark.parametrize("v", [5, 64, 300, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_by_blocks_are_the_largest(v, dtype, few, monkeypatch):
    """In bfloat16 with ties, and minus infinity; each place is given once."""
    monkeypatch.setattr(sampling, "ONE_PASS_NUMBERS", few)
    scores = torch.randn(2, 20, v, generator=seeded(0), dtype=torch.float64).to(dtype)
    scores[0, 0, 3:] = -torch.inf
    for k in (1, 5):
        values, places = select_topk(scores, k)
        assert torch.equal(values, scores.topk(k).values.to(values.dtype))
        assert torch.equal(scores.gather(-1, places).to(values.dtype), values)
        assert (places.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("few", [0, sampling.ONE_PASS_NUMBERS])
def test_greedy_choice_from_logits_that_are_not_numbers_has_no_token(few, monkeypatch):
    monkeypatch.setattr(sampling, "ONE_PASS_NUMBERS", few)
    logits = randn(3, 5000, generator=seeded(0))
    logits[1, 4321] = torch.nan
    expected = logits.argmax(-1)
    expected[1] = 5000
    assert torch.equal(choose_greedy(logits), expected)
