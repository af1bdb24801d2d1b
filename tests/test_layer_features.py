"""Heads read the inputs of a text's own layers, or are refused where a token has several streams of hidden states."""

import pytest
import torch
import transformers as hf
from commands import complains
from models import MODELS, close, random_eagle3, random_model, random_prefix, target, tiny
from training import read_refusal, small_run, tokenizer, write_data

from treespec import load
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target


def save_target(folder, name):
    words = tokenizer()
    sizes = {"vocab_size": len(words), "vocab_size_per_layer_input": len(words)}
    random_model(tiny(MODELS[name], sizes)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["gemma3n_text", "hy_v4", "qwen4_exp_text"])
def test_a_head_that_reads_layers_of_several_streams_is_refused_at_loading(name, tmp_path):
    model = random_model(tiny(MODELS[name]))
    save_head(random_eagle3(target("llama")), tmp_path / "head")
    with complains("several streams of hidden states .* such as one of kind eagle"):
        load(model, head=tmp_path / "head")


@pytest.mark.parametrize("stored", [False, True])
def test_training_a_head_on_several_streams_is_refused_before_it_runs(stored, tmp_path):
    folder = save_target(tmp_path / "target", "gemma3n_text")
    config = small_run(folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head")
    features = f"{tmp_path}/features" if stored else None
    assert "several streams" in read_refusal(config, head="eagle3", features=features)
    assert not (tmp_path / "head" / "model.safetensors").exists()


def test_layers_of_a_vision_tower_are_not_those_of_the_text():
    """GIT's two stacks have equally many layers, and the vision tower's comes first."""
    model = random_model(tiny(MODELS["git"]))
    text = random_prefix()
    found = Target(model).compute_features(text, (0, 1, 2))
    with torch.inference_mode():
        states = model(input_ids=text, output_hidden_states=True).hidden_states
    close(found, torch.cat(states[:3], dim=-1), 1e-4)
    assert hf.models.git.modeling_git.GitLayer in {type(layer) for layer in Target(model).tree_decoder.stack}
