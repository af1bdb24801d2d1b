"""The kernel that chooses an output: the token with the largest score, as the operations of torch choose it."""

import math

import pytest
import torch
from models import randn, seeded

from treespec.draft.calibration import scale_by_sharpness
from treespec.draft.cycle import can_score_by_kernel
from treespec.kernels import ops as kernels
from treespec.sampling.noise import Noise
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Sampler, TargetDistributions
from treespec.verify.batch import can_choose_by_kernel, choose_by_kernel

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")


def build_distributions(logits, params, seed=None):
    sampler = Sampler(params)
    if seed is not None:
        sampler.noise = Noise(seed, logits.shape[-1], torch.device("cpu"), kernels.fill_noise)
    return TargetDistributions(logits, sampler)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("size", [5, 16, 1000, 9003])
def test_the_kernel_chooses_the_token_that_torch_chooses(dtype, temperature, size):
    """Logits of few distinct values: many are equal, and of equal ones the first is chosen."""
    logits = torch.randint(-9, 9, (40, size), generator=seeded(size)).div(4).to(dtype)
    seed = None if temperature == 0 else 7
    p = build_distributions(logits, SamplingParams(temperature), seed)
    assert can_choose_by_kernel(p)
    for node in range(len(logits)):
        for depth in (0, 3):
            assert choose_by_kernel(p, node, depth) == p.choose_output(node, depth)


@pytest.mark.parametrize("place", [0, 17, 34])
def test_no_token_is_chosen_where_a_score_is_not_a_number(place):
    logits = torch.zeros(1, 35, dtype=torch.float32)
    logits[0, place] = math.nan
    assert choose_by_kernel(build_distributions(logits, SamplingParams(0.0)), 0, 0) == 35


def test_the_first_token_is_chosen_where_none_is_possible():
    p = build_distributions(torch.full((1, 35), -math.inf, dtype=torch.float32), SamplingParams(0.0))
    assert choose_by_kernel(p, 0, 0) == p.choose_output(0, 0) == 0


def test_a_cut_tail_and_other_dtypes_are_left_to_torch():
    logits = torch.zeros(1, 35, dtype=torch.float32)
    assert not can_choose_by_kernel(build_distributions(logits, SamplingParams(1.0, top_p=0.9), 7))
    assert not can_choose_by_kernel(build_distributions(logits.double(), SamplingParams(0.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("factor", [1.0, 1.137])
@pytest.mark.parametrize("vocabulary", [None, torch.arange(3, 120, 4)])
def test_the_kernel_scores_draft_tokens_as_torch_does(dtype, temperature, factor, vocabulary):
    size = 120 if vocabulary is None else len(vocabulary)
    logits = randn(5, size, generator=seeded(1)).to(dtype)
    sampler = Sampler(SamplingParams(temperature))
    sampler.noise = Noise(3, 120, torch.device("cpu"), kernels.fill_noise)
    expected = sampler.score_tokens(scale_by_sharpness(logits, 1, (2.0, factor)), 1, vocabulary)
    assert can_score_by_kernel(sampler, logits)
    tokens = torch.arange(120) if vocabulary is None else vocabulary
    noise = sampler.noise.compute_for_tokens(1, tokens)
    assert torch.equal(kernels.score_tokens(logits, noise, factor, temperature), expected)
