"""Logits are those of the model's own code, whatever it does before and after its output embedding."""

import pytest
import torch
import transformers as hf
from models import (
    CONFIGS,
    GROUPED,
    MODELS,
    close,
    list_node_paths,
    plain_logits,
    randn,
    random_head,
    random_model,
    random_prefix,
    random_tree,
    tiny,
)

from treespec import load
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

TOLERANCE = 1e-3
FACTORS = {
    "falcon_h1": {"lm_head_multiplier": 0.25, "embedding_multiplier": 3.0},
    "hyperclovax": {"logits_scaling": 0.25, "embedding_multiplier": 3.0},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0},
    "nanochat": {"final_logit_softcapping": 3.0},
    "minicpm3": {},
    "mamba": {},
    "hy_v4": {},
}
CASTS = ["mamba", "mamba2", "falcon_mamba", "hy_v4", *FACTORS]


def model_of(name):
    return random_model(tiny(MODELS[name], FACTORS.get(name)))


@pytest.mark.parametrize("name", FACTORS)
def test_a_tree_has_the_logits_of_the_models_own_code(name):
    model = model_of(name)
    tree = random_tree()
    text = random_prefix()
    target = Target(model)
    cache = target.build_cache()
    target.prefill(cache, text)
    logits = target.forward_tree(cache, tree).logits
    for node, path in list_node_paths(tree):
        plain = plain_logits(model, [*text[0].tolist(), *tree.tokens[path].tolist()])[-1]
        close(logits[node], plain, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("name", FACTORS)
def test_logits_of_a_part_of_the_vocabulary_are_those_of_all(name):
    target = Target(model_of(name))
    tokens = torch.tensor([3, 1, 40])
    hidden = randn(2, 3, target.feature_width)
    part = target.compute_output_logits(hidden, target.copy_output_rows(tokens))
    close(part, target.compute_output_logits(hidden)[..., tokens], 1e-5, 1e-5)
    assert target.compute_output_logits(hidden[:, :0]).shape == (2, 0, target.vocab_size)


# Their layers are those of mamba2 and of the others, their last steps those of granite and gemma2.
SLOW_CASTS = {"falcon_h1", "falcon_mamba", "mamba", "hy_v4", "hyperclovax", "nanochat"}
CASTS_BY_TIME = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_CASTS)) for name in sorted({*CASTS})]


@pytest.mark.parametrize("name", CASTS_BY_TIME)
def test_a_model_in_16_bits_decodes_as_its_own_generate_does(tmp_path, name):
    model_of(name).bfloat16().save_pretrained(tmp_path / "target")
    how = {"device_map": "cpu", "dtype": "bfloat16"}
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "target", **how)
    head = random_head(Target(plain))
    save_head(head.bfloat16(), tmp_path / "head")
    prompt = random_prefix(length=7)
    wanted = plain.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 7:].tolist()
    for drafts in ({"drafter": "suffix:tokens=4"}, {"head": tmp_path / "head"}):
        spec = load(tmp_path / "target", **how, **drafts)
        answer = spec.generate(prompt[0].tolist(), max_new_tokens=8, ignore_eos=True)
        assert same_or_tied(plain, prompt[0].tolist(), answer.token_ids, wanted)


def same_or_tied(model, prompt, found, wanted):
    """Whether two texts are the same, or part where the model's two best tokens are a rounding apart."""
    first = next((i for i, pair in enumerate(zip(found, wanted, strict=True)) if len({*pair}) > 1), None)
    if first is None:
        return True
    logits = plain_logits(model, [*prompt, *wanted[:first]])[-1].float()
    return bool((logits.max() - logits[found[first]]).abs() <= 0.05 * logits.std())


def test_an_output_embedding_alone_is_called_without_the_models_forward():
    target = Target(random_model(hf.LlamaConfig(**GROUPED)))
    hidden = randn(4, target.feature_width)
    calls = []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(target.compute_output_logits(hidden), target.model.lm_head(hidden))
    assert not calls
    capped = Target(random_model(CONFIGS["gemma3"]()))
    capped.model.register_forward_hook(lambda *_: calls.append(1))
    assert capped.compute_output_logits(1e3 * hidden).abs().max() <= 3.0
    assert calls


@pytest.mark.parametrize("drafted", [None, [3, 1, 40]])
def test_training_gets_the_gradient_through_a_cap(drafted):
    target = Target(model_of("gemma2"))
    tokens = torch.arange(target.vocab_size) if drafted is None else torch.tensor(drafted)
    rows = None if drafted is None else target.copy_output_rows(tokens)
    weight = target.model.lm_head.weight[tokens]
    cap = FACTORS["gemma2"]["final_logit_softcapping"]
    hidden = randn(5, target.feature_width, requires_grad=True)
    (found,) = torch.autograd.grad(target.compute_output_logits(hidden, rows).square().sum(), hidden)
    capped = torch.tanh(hidden @ weight.T / cap) * cap
    (wanted,) = torch.autograd.grad(capped.square().sum(), hidden)
    close(found, wanted, 1e-4, 1e-4)
