"""Texts decoded together are the texts decoded alone: to the token where greedy, to the law where sampled."""

import pytest
import torch
from models import CONFIGS, random_head, target

from treespec.draft.calibration import Calibration
from treespec.spec import Spec

LENGTHS = (7, 60, 1, 19)  # tokens of the prompts; a prompt of one token leaves nothing to draft from
CALIBRATION = Calibration((0.0,) * 4, (0.0,) * 7, {"1": [(0.1, 4.0), (0.01, 30.0)]})


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def tokens(outputs):
    return [output.token_ids for output in outputs]


def alone(spec, texts, **options):
    return [spec.generate(text, **options).token_ids for text in texts]


@pytest.fixture(scope="module")
def llama():
    model = target("llama")
    return Spec(model, random_head(model), calibration=CALIBRATION)


@pytest.fixture(scope="module")
def wanted(llama):
    return alone(llama.baseline(), prompts(), max_new_tokens=24)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_greedy_batch_equals_each_text_alone_on_every_architecture(name):
    model = target(name)
    spec = Spec(model, random_head(model), "2x3")
    expected = alone(spec.baseline(), prompts(), max_new_tokens=20)
    assert tokens(spec.generate(prompts(), max_new_tokens=20)) == expected
    assert tokens(spec.baseline().generate(prompts(), max_new_tokens=20)) == expected


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("topk", "dynamic:depth=3,topk=4,nodes=9"),
        ("rrs-wo", "eagle"),
        ("block", "chain:4"),
        ("traversal", "sampled:nodes=12,depth=3"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_greedy_batch_equals_each_text_alone_for_every_kind_of_tree(llama, wanted, verifier, tree, batch):
    outputs = llama.configured(tree, verifier).generate(prompts(), max_new_tokens=24, batch=batch)
    assert tokens(outputs) == wanted
