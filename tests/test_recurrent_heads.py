"""Heads for targets with recurrent layers: they train, load with the target's packed weights, and draft."""

import pytest
import torch
from models import random_model, tokenizer
from refusals import complains
from tiny_configs import MODELS, tiny
from training import small_run, write_data

from treespec import load
from treespec.model.target import Target
from treespec.train.run import train


def save(name, folder):
    """A tiny target with sharp laws, and the tests' tokenizer."""
    words = tokenizer()
    sizes = {"vocab_size": len(words), "eos_token_id": 2, "max_position_embeddings": 512}
    model = random_model(tiny(MODELS[name], sizes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_a_head_trains_on_a_recurrent_target_and_drafts_without_changing_a_token(name, tmp_path):
    folder = save(name, tmp_path / "target")
    config = small_run(folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head", max_steps=2)
    train(config)
    spec = load(str(folder), str(tmp_path / "head"), tree="2x2", dtype="float32")
    assert spec.target.recurrent
    prompts = ["the user asks", "the assistant answers the question the user asks"]
    wanted = [spec.baseline().generate(text, max_new_tokens=16).token_ids for text in prompts]
    outputs = spec.generate(prompts, max_new_tokens=16, batch=2)
    assert [output.token_ids for output in outputs] == wanted
    assert sum(outputs[0].stats.drafted) > 0
    plain = Target.load(str(folder), dtype="float32").model
    text = spec.encode(prompts[0])
    for token in wanted[0]:
        logits = plain(input_ids=torch.tensor([text])).logits[0, -1]
        assert logits.max() - logits[token] < 1e-4
        text.append(token)


@pytest.mark.parametrize("drafter", ["sparse:64", "self:{folder}/skip.json"])
def test_drafters_over_keys_and_values_refuse_a_recurrent_target(drafter, tmp_path):
    folder = save("lfm2", tmp_path / "target")
    with complains(r"Lfm2ForCausalLM.* state|state.*Lfm2ForCausalLM"):
        load(str(folder), drafter=drafter.format(folder=folder), dtype="float32")


@pytest.mark.parametrize("drafter", ["lookahead:window=4,ngram=3,guesses=4", "lookup:matches=3"])
def test_rows_beside_a_tree_and_trees_from_the_text_go_through_recurrent_layers(drafter, tmp_path):
    folder = save("lfm2", tmp_path / "target")
    spec = load(str(folder), drafter=drafter, dtype="float32")
    prompts = ["the user asks and the user asks and the user", "the assistant answers"]
    wanted = [spec.baseline().generate(text, max_new_tokens=16).token_ids for text in prompts]
    assert [output.token_ids for output in spec.generate(prompts, max_new_tokens=16, batch=2)] == wanted
