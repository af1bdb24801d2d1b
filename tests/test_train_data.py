"""What training reads: answers that a limit cut; and the card that says so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML, byte_tokenizer, turns
from safetensors.torch import load_file
from training import checkpoint_of, trained, weights

from treespec.api.load import load
from treespec.draft.trained.kinds import FEW, FIELD
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.text.entries import Conversation
from treespec.train.loop.steps import draft_steps_at
from treespec.train.run import train


@pytest.fixture
def config(config):
    return replace(config, max_steps=1)


@pytest.mark.parametrize("ended, ends", [(["max_new_tokens", "model"], 1), (["max_new_tokens"], 0)])
def test_an_answer_that_a_limit_cut_has_no_end_token_to_learn(tmp_path, ended, ends):
    """Of two answers the first was cut; where it is unclear which one was, no end token is learnt."""
    tokenizer, messages = byte_tokenizer(CHATML), turns(["u Hi", "a Hello", "u Bye", "a So long"])
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages, "ended": ended}))
    (whole,), _ = encode_conversations(tokenizer, [Conversation(messages)], None, 100)
    (cut,), _ = encode_conversations(tokenizer, read_conversations(file)[0], None, 100)
    assert torch.equal(whole.input_ids, cut.input_ids)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    unlearnt = whole.input_ids[whole.loss_mask != cut.loss_mask].tolist()
    assert unlearnt == [end] * (2 - ends)
    assert cut.input_ids[cut.loss_mask].tolist().count(end) == ends
    assert (int(cut.input_ids[cut.loss_mask][-1]) == end) == bool(ends)


def test_a_head_directory_holds_its_own_weights_alone_in_the_dtype_of_the_target(config):
    config = trained(config, dtype="bfloat16", checkpoint_every=1)
    stored, whole = weights(config), load_file(checkpoint_of(config, 1) / "model.safetensors")
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in stored.items())  # rounded once
    assert "embed_tokens.weight" not in stored
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    spec = load(config.target, config.out, "chain:3", "topk", dtype="float32")
    assert spec.head.embed_tokens.weight is spec.target.model.get_input_embeddings().weight
    assert len(spec.head.config[FIELD]) >= FEW


def test_a_run_leaves_a_card_and_writes_it_anew_unless_someone_completed_it(config):
    card, result = Path(config.out) / "README.md", train(config)
    said = card.read_text()
    assert f"--data {config.data} --out {config.out} --max-steps 1" in said
    assert f"{config.data}: 19 conversations, " in said
    assert f"{result.agreement[0]:.1%}" in said
    assert "license: FILL IN" in said
    trained(config, max_steps=2)
    assert "2 optimizer steps" in card.read_text()
    card.write_text(card.read_text().replace("FILL IN", "apache-2.0"))
    trained(config, max_steps=3)
    assert "2 optimizer steps" in card.read_text()


def test_later_draft_steps_are_trained_in_the_second_half(config):
    for growing in (replace(config, unrolled_steps=3), replace(config, head="eagle3")):
        assert [draft_steps_at(growing.recipe, behind) for behind in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 3, 3]
    published = replace(config, head="eagle3", unrolled_steps=7, grow_at=0.0)
    assert draft_steps_at(published.recipe, 0.0) == 7
    assert train(replace(config, unrolled_steps=3, max_steps=4, draft_vocab=20)).positions > 0
