"""One forward over a tree is the forward over each of its paths, for every architecture that can branch."""

import pytest
import torch
import transformers as hf
from commands import complains
from models import (
    CONFIGS,
    LOGITS_TOLERANCE,
    MODELS,
    PREFIX_TOKENS,
    VOCAB,
    close,
    random_model,
    random_prefix,
    random_tree,
    target,
    tiny,
)

from treespec.api.load import load
from treespec.model.target import Target

CANNOT_BRANCH = {
    "bloom": (lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
    "falcon-alibi": (
        lambda: hf.FalconConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        "ALiBi",
    ),
    "gpt-neo": (
        lambda: hf.GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]]
        ),
        "local attention",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_commit_equals_a_fresh_prefill(name):
    model = target(name)
    tree = random_tree()
    text = random_prefix()
    path = [0, 1, 5, 8]  # moves keys and values
    assert tree.ancestors[8].nonzero().flatten().tolist() == path
    cache = model.build_cache(capacity=16)
    model.prefill(cache, text)
    model.forward_tree(cache, tree)
    cache.commit([path])
    again = model.build_cache(capacity=64)
    model.prefill(again, torch.cat([text, tree.tokens[path][None]], dim=1))
    assert cache.lengths == again.lengths == [PREFIX_TOKENS + 4]
    following = random_tree(seed=7)
    ours = model.forward_tree(cache, following)
    fresh = model.forward_tree(again, following)
    close(ours.logits, fresh.logits, LOGITS_TOLERANCE, LOGITS_TOLERANCE)
    close(ours.features, fresh.features, LOGITS_TOLERANCE, LOGITS_TOLERANCE)


def test_aux_layers_are_transformers_hidden_states():
    model = target("llama")
    text = random_prefix()
    aux_layers = (0, 1, 2)
    cache = model.build_cache()
    features = torch.cat([model.prefill(cache, part, aux_layers) for part in text.split(4, 1)], 1)
    with torch.inference_mode():
        states = model.model(input_ids=text, output_hidden_states=True).hidden_states
    close(features, torch.cat([states[k] for k in aux_layers], dim=-1), LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", CANNOT_BRANCH)
def test_what_cannot_hold_a_tree_is_refused_with_the_reason(name):
    make, reason = CANNOT_BRANCH[name]
    model = hf.AutoModelForCausalLM.from_config(make())
    with complains(reason) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value)


def test_a_model_whose_logits_depend_on_more_than_hidden_states_is_refused():
    model = random_model(CONFIGS["llama"]())
    plain_forward = model.forward

    def shifted(input_ids, **kwargs):
        out = plain_forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + input_ids[..., None]
        return out

    model.forward = shifted
    with complains("output path"):
        Target(model)


def model_that_garbles_trees():
    """Its rows depend on their number, as in bitsandbytes' 8 bits: those of three, as a tree's, come out wrong."""
    model = random_model(CONFIGS["llama"]())
    model.model.norm.register_forward_hook(lambda _, __, out: out.flip(-1) if out.shape[1] == 3 else out)
    return model


def test_a_target_whose_trees_fail_decodes_one_token_at_a_time(caplog):
    spec = load(model_that_garbles_trees())
    (line,) = caplog.messages
    assert line.startswith("one token at a time, since trees fail a check: LlamaForCausalLM cannot be used: its logits")
    assert spec.drafting_sentence == "one token at a time, without drafts"
    plain = load(random_model(CONFIGS["llama"]()), drafter="none")
    prompts = [random_prefix()[0].tolist(), [3, 4]]
    wanted = [output.token_ids for output in plain.generate(prompts, max_new_tokens=6)]
    assert [output.token_ids for output in spec.generate(prompts, max_new_tokens=6)] == wanted


def test_a_drafter_by_name_is_refused_where_trees_fail():
    with complains("LlamaForCausalLM cannot be used: its logits"):
        load(model_that_garbles_trees(), drafter="suffix")


PARTS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


@pytest.mark.parametrize("parts", [["model.layers"], ["model.embed_tokens"], ["lm_head"], PARTS])
def test_an_offloaded_target_scores_the_same_tree(tmp_path, parts):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "model")
    places = {part: "disk" if part in parts else "cpu" for part in [*PARTS, "model.rotary_emb"]}
    outs = []
    for device_map in ("cpu", places):
        model = Target.load(f"{tmp_path}/model", dtype="float32", device_map=device_map)
        cache = model.build_cache()
        model.prefill(cache, random_prefix())
        outs.append(model.forward_tree(cache, random_tree()).logits)
        assert model.device == model.output_device == torch.device("cpu")
    close(*outs, LOGITS_TOLERANCE)


def test_an_offloaded_recurrent_target_scores_the_same_tree(tmp_path):
    random_model(tiny(MODELS["qwen3_next"], {"tie_word_embeddings": False})).save_pretrained(tmp_path / "model")
    places = dict.fromkeys([*PARTS, "model.rotary_emb"], "cpu") | {"model.embed_tokens": "disk"}
    outs = []
    for device_map in ("cpu", places):
        model = Target.load(f"{tmp_path}/model", dtype="float32", device_map=device_map)
        cache = model.build_cache()
        model.prefill(cache, random_prefix())
        outs.append(model.forward_tree(cache, random_tree()).logits)
    close(*outs, LOGITS_TOLERANCE)
