"""Every causal language model of transformers scores a tree as each path, or is refused by name."""

import functools

import pytest
import torch
import transformers as hf
from equality import close
from models import random_eagle3, random_head, random_model
from refusals import complains
from test_target import plain_logits, prefix, random_tree
from tiny_configs import MODELS, tiny

from treespec.errors import InputError
from treespec.model.target import Target

PREFIX = 25  # tokens, four times the windows and chunks of 6
TOLERANCE = 1e-3
LISTED_FOR = "5.23"  # the version of transformers that these lists and tests/tiny_configs.py are for
BUILT_BY_NOBODY = {  # transformers raises while it builds them, from any config
    "dots3_note": "the config's per-layer entries are for 42 layers, whatever the number of layers",
    "gemma3n": "its vision tower needs timm and pillow; gemma3n_text is its language model",
    "gemma4_assistant": "it has no keys and values of its own: it drafts on another model's cache",
    "gemma4_unified_assistant": "it has no keys and values of its own: it drafts on another model's cache",
    "musicgen": "it reads fields of its decoder's config from the whole one",
    "musicgen_melody": "it reads fields of its decoder's config from the whole one",
}
LARGE = {"gemma4_unified", "phi4_multimodal", "dots3_note_text"}  # a second each: their towers have fixed sizes
SEVERAL_STREAMS = {"gemma3n_text", "hy_v4", "qwen4_exp", "qwen4_exp_text"}  # of hidden states, from layer to layer
TAKEN = {
    "bailing_hybrid", "bamba", "cohere", "cohere2", "dbrx", "deepseek_v3", "doge", "falcon", "falcon_h1",
    "falcon_mamba", "gemma2", "gemma3", "gemma3n_text", "gemma4", "gemma4_text", "git", "glm4", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoehybrid", "hy_v4", "hyperclovax", "jamba", "jetmoe", "kimi_linear",
    "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mamba", "mamba2", "mistral", "mixtral", "moshi", "nemotron_h",
    "olmo3", "olmo_hybrid", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "smollm3", "starcoder2", "youtu", "zamba", "zamba2", "zaya",
}  # fmt: skip


def equal_or_refused(model):
    """The reason of a refusal; None after a tree's logits were equal to those of its paths."""
    try:
        target = Target(model)
    except InputError as error:
        return str(error)
    cache = target.new_cache(capacity=4)
    text = prefix(length=PREFIX)
    tree = random_tree()
    for part in text.split(7, 1):
        target.prefill(cache, part)
    logits = target.forward_tree(cache, tree).logits
    for leaf in set(range(len(tree.tokens))) - set(tree.parents.tolist()):
        path = tree.ancestors[leaf].nonzero().flatten()
        plain = plain_logits(model, text[0].tolist() + tree.tokens[path].tolist())[-len(path) :]
        close(logits[path], plain, TOLERANCE, TOLERANCE)
    drafts_with(random_head(target), target)
    if model.config.model_type in SEVERAL_STREAMS:
        with complains(f"{type(model).__name__} .* several streams"):
            random_eagle3(target)
    else:
        drafts_with(random_eagle3(target), target)
    return None


def drafts_with(head, target):
    """A head takes the target's own features, those of a prefill and those of training alike."""
    text = prefix(length=9)
    features = target.features(text, head.aux_layers)
    close(target.prefill(target.new_cache(), text, head.aux_layers), features, TOLERANCE, TOLERANCE)
    hidden = head.step(text, head.fuse(features), torch.arange(9))
    logits = head.logits(hidden, target)
    assert logits.shape == (1, 9, target.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", sorted(MODELS.keys() - BUILT_BY_NOBODY.keys() - LARGE))
def test_a_tree_is_scored_as_its_paths_or_the_model_is_refused_by_name(name):
    try:
        model = random_model(tiny(MODELS[name]))
    except Exception as error:
        if hf.__version__.startswith(LISTED_FOR):
            raise
        pytest.skip(f"transformers {hf.__version__} builds it from another config: {error}")
    reason = equal_or_refused(model)
    if name in TAKEN:
        assert reason is None
    elif reason is not None:
        assert "cannot be" in reason
        assert type(model).__name__.removesuffix("ForCausalLM")[:6] in reason
        assert "\n" not in reason
        assert ("ALiBi" in reason) == (name in ("bloom", "mpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE & MODELS.keys()))
def test_a_model_with_large_towers_is_no_exception(name):
    assert equal_or_refused(random_model(tiny(MODELS[name]))) is None or name == "dots3_note_text"


def test_a_window_that_the_model_does_not_use_is_not_applied():
    target = Target(random_model(tiny(MODELS["moshi"], {"sliding_window": 40, "num_hidden_layers": 1})))
    assert set(target.windows.values()) == {None}


def test_a_window_far_beyond_the_check_is_seen():
    """The model's window is 16, its config says 64: the check at loading runs over neither, and finds out."""
    model = random_model(hf.MistralConfig(**tiny(MODELS["mistral"]).to_dict() | {"sliding_window": 64}))
    plain_forward = model.model.forward

    @functools.wraps(plain_forward)
    def sixteen(*args, **kwargs):
        if kwargs.get("past_key_values") is not None:
            return plain_forward(*args, **kwargs)
        before = model.config.sliding_window
        model.config.sliding_window = 16
        try:
            return plain_forward(*args, **kwargs)
        finally:
            model.config.sliding_window = before

    assert Target(model).windows == {"sliding_attention": 64}
    model.model.forward = sixteen
    with complains("masks"):
        Target(model)


@pytest.mark.parametrize("window", [5, 60, 1000])
def test_a_window_of_any_size_stays_as_the_config_says(window):
    model = random_model(hf.MistralConfig(**tiny(MODELS["mistral"]).to_dict() | {"sliding_window": window}))
    assert Target(model).windows == {"sliding_attention": window}
    assert model.config.sliding_window == window
    assert equal_or_refused(model) is None
