"""Every causal language model of transformers scores a tree as each path, or is refused by name."""

import functools

import pytest
import transformers as hf
from commands import complains
from drafters import check_tree_logits
from models import (
    MODEL_NAMES,
    MODELS,
    random_model,
    tiny,
)

from treespec.model.target import Target

LISTED_FOR = "5.23"  # the version of transformers that these lists and the small configs of tests/models.py are for
BUILT_BY_NOBODY = {  # transformers raises while it builds them, from any config
    "dots3_note": "the config's per-layer entries are for 42 layers, whatever the number of layers",
    "gemma3n": "its vision tower needs timm and pillow; gemma3n_text is its language model",
    "gemma4_assistant": "it has no keys and values of its own: it drafts on another model's cache",
    "gemma4_unified_assistant": "it has no keys and values of its own: it drafts on another model's cache",
    "musicgen": "it reads fields of its decoder's config from the whole one",
    "musicgen_melody": "it reads fields of its decoder's config from the whole one",
}
LARGE = {"gemma4_unified", "phi4_multimodal", "dots3_note_text"}  # a second each: their towers have fixed sizes
TAKEN = {
    "bailing_hybrid", "bamba", "cohere", "cohere2", "dbrx", "deepseek_v3", "doge", "falcon", "falcon_h1",
    "falcon_mamba", "gemma2", "gemma3", "gemma3n_text", "gemma4", "gemma4_text", "git", "glm4", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoehybrid", "hy_v4", "hyperclovax", "jamba", "jetmoe", "kimi_linear",
    "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mamba", "mamba2", "mistral", "mixtral", "moshi", "nemotron_h",
    "olmo3", "olmo_hybrid", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "smollm3", "starcoder2", "youtu", "zamba", "zamba2", "zaya",
}  # fmt: skip
ALIKE = {  # they ask of a tree what one of the others does: `make test-products` runs them too
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "beam", "biogpt", "bitnet", "codegen",
    "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v32", "diffllama", "dots1",
    "emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "fuyu", "gemma",
    "gemma3_text", "gemma4_unified_text", "glm", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2",
    "gpt-sw3", "gpt_bigcode", "gpt_neox_japanese", "gptj", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder",
    "jais2", "kolibri1", "laguna", "llama4", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "ministral3", "mllama", "moss_transcribe_diarize", "nanochat",
    "nemotron", "olmo", "olmo2", "olmoe", "persimmon", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen4_exp", "seed_oss", "solar_open", "stablelm", "vaultgemma", "xglm",
}  # fmt: skip
NAMES = sorted({*MODEL_NAMES} - BUILT_BY_NOBODY.keys() - LARGE)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in NAMES])
def test_a_tree_scores_as_its_paths_or_the_model_is_refused(name):
    try:
        model = random_model(tiny(MODELS[name]))
    except Exception as error:
        if hf.__version__.startswith(LISTED_FOR):
            raise
        pytest.skip(f"transformers {hf.__version__} builds it from another config: {error}")
    reason = check_tree_logits(model)
    if name in TAKEN:
        assert reason is None
    elif reason is not None:
        assert "cannot be" in reason
        assert type(model).__name__.removesuffix("ForCausalLM")[:6] in reason
        assert "\n" not in reason
        assert ("ALiBi" in reason) == (name in ("bloom", "mpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE & {*MODEL_NAMES}))
def test_a_model_with_large_towers_is_no_exception(name):
    assert check_tree_logits(random_model(tiny(MODELS[name]))) is None or name == "dots3_note_text"


def test_a_window_that_the_model_does_not_use_is_not_applied():
    target = Target(random_model(tiny(MODELS["moshi"], {"sliding_window": 40, "num_hidden_layers": 1})))
    assert set(target.tree_decoder.windows.values()) == {None}


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

    assert Target(model).tree_decoder.windows == {"sliding_attention": 64}
    model.model.forward = sixteen
    with complains("masks"):
        Target(model)


@pytest.mark.parametrize("window", [5, 60, 1000])
def test_a_window_of_any_size_stays_as_the_config_says(window):
    model = random_model(hf.MistralConfig(**tiny(MODELS["mistral"]).to_dict() | {"sliding_window": window}))
    assert Target(model).tree_decoder.windows == {"sliding_attention": window}
    assert model.config.sliding_window == window
    assert check_tree_logits(model) is None
