"""Numbers do not depend on the default dtype of the program that calls treespec."""

import pytest
import torch
import transformers as hf
from models import GROUPED, rand, randn, random_prefix, seeded, target, zeros
from transformers.modeling_utils import local_torch_dtype

from treespec.draft.heads.loading import build_new_head
from treespec.eval.certify.ranks import predict_repeats
from treespec.heads.formats.gguf import compute_frequency_factors
from treespec.heads.registry import HEAD_KINDS
from treespec.sampling.processors import Penalties, TransformersProcessor
from treespec.train.losses.objectives import TrainingBatch, add_feature_noise
from treespec.verify.rates import bound_optimum
from treespec.verify.rrs import RRS

STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def add_noise():
    features = zeros(2, 9, 4)
    tokens = random_prefix(length=18).view(2, 9)
    batch = TrainingBatch(tokens, tokens > 9, features, torch.tensor([9, 7]), seeded(1), 1)
    return add_feature_noise(batch, 0.1)


def estimate_bound():
    p, q = rand(2, 3, 40, generator=seeded(2)).softmax(-1)
    return bound_optimum(RRS(), p, q, 3, seeded(3))


COMPUTATIONS = {
    "noise on features": add_noise,
    "drafts of repeats": lambda: predict_repeats(random_prefix(length=30)[0], 0, 64),
    "stretched rotary positions": lambda: compute_frequency_factors(
        hf.LlamaConfig(**GROUPED, head_dim=8, rope_parameters=STRETCHED)
    ),
    "a bound of acceptance": estimate_bound,
    "penalties": lambda: Penalties(1.1, 0.3, 0.2).process_logits([5], [(5, 6)], randn(1, 9, generator=seeded(4))),
}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_numbers_do_not_depend_on_the_default_dtype(name, default):
    with local_torch_dtype(torch.float32):
        expected = COMPUTATIONS[name]()
    with local_torch_dtype(default):
        found = COMPUTATIONS[name]()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_new_head_is_in_float32(kind, default):
    with local_torch_dtype(default):
        head = build_new_head(kind, target("llama"))
    assert {weight.dtype for weight in head.state_dict().values() if weight.is_floating_point()} == {torch.float32}


def test_a_processor_may_return_scores_of_another_dtype():
    """As one that counts tokens does, under another default dtype."""
    logits = randn(2, 9, generator=seeded(5))
    halved = TransformersProcessor(lambda tokens, scores: scores.double() / 2)
    assert torch.equal(halved.process_logits([5], [(), (6,)], logits), logits / 2)
