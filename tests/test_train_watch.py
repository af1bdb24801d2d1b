"""What a run reads, and what it says of itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from training import (
    CHATML,
    byte_tokenizer,
    checkpoint_of,
    folder_of,
    load_weights,
    metrics_of,
    to_messages,
    train_to_end,
)

from treespec.api.load import load
from treespec.draft.heads.loading import SAMPLE_TOKENS, TARGET_TOKENS_FIELD, build_new_head
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.target import Target
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.text.entries import Conversation
from treespec.train.checkpoints import Place
from treespec.train.loop import run as watch
from treespec.train.loop.meter import Meter
from treespec.train.loop.run import Validation, measure_decoded_length
from treespec.train.loop.steps import draft_steps_at
from treespec.train.losses.tokens import Loss
from treespec.train.run import train


def test_the_decoded_length_is_what_a_spec_over_the_saved_head_counts(model_folder, tmp_path):
    model = Target.load(str(model_folder), dtype="float32")
    head = build_new_head("eagle", model)
    prompts = [[3, 4, 5], [7, 8, 9, 10]]
    save_head(head, tmp_path / "head")
    spec = load(str(model_folder), f"{tmp_path}/head", "chain:3", "topk", dtype="float32")
    stats = [spec.generate(prompt, temperature=0.0, max_new_tokens=20).stats for prompt in prompts]
    accepted = sum(sum(one.accepted) for one in stats)
    cycles = sum(one.cycles for one in stats)
    found = measure_decoded_length(head, model, prompts, steps=3, tokens=20)
    assert found == pytest.approx(1 + accepted / cycles)


def test_validations_hold_what_was_decoded_beside_what_was_predicted(config):
    result = train(replace(config, decode_on=2, validate_every=3))
    assert result.decoded_length >= 1
    assert f"decoding commits {result.decoded_length:.2f}" in str(result)
    (line,) = [line for line in metrics_of(config) if "acceptance_length" in line]
    assert line["step"] == 3
    assert line["decoded_length"] >= 1


def test_the_best_validated_head_and_the_last_one_are_saved(config, monkeypatch):
    found = iter([2.0, 3.0, 1.5])
    monkeypatch.setattr(watch, "validate_head", lambda run, limit, rows=None: Validation([0.5], next(found), 10))
    train_to_end(config, max_steps=4, validate_every=1, checkpoint_every=1)
    names = ("best", "checkpoint-000003", "checkpoint-000004")
    best, third, last = (load_file(folder_of(config) / name / "model.safetensors") for name in names)
    assert all(torch.equal(value, last[name].to(value.dtype)) for name, value in load_weights(config).items())
    assert load_head(folder_of(config) / "best").kind == "eagle"
    assert not any(torch.equal(best["fc.weight"], later["fc.weight"]) for later in (third, last))


def test_reported_losses_are_means_over_the_steps_since_the_last_report(tmp_path):
    meter = Meter(Accelerator(cpu=True), tmp_path / "metrics.jsonl", Place())
    values = torch.tensor([1.0, 2.0, 6.0])
    meter.count([Loss(values[0], {"token": values[1], "tokens": values[2]})])
    meter.count([Loss(values[1], {"token": values[2], "token_2": values[0]}), Loss(values[2], {"token": values[0]})])
    for _ in range(2):  # the second time there is nothing to say
        meter.write_line(3, 2.0, 0.5, 0.1)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    expected = {"total": 3.0, "token": 3.0, "token_2": 1.0, "learning_rate": 0.1, "seconds": 2.0}
    assert line == expected | {"step": 3, "tokens_per_second": 6.0 * 3 / 2.0}


def test_a_line_of_metrics_has_what_a_run_is_watched_by(config):
    train(replace(config, head="eagle3", unrolled_steps=3, max_steps=8))
    (line,) = [line for line in metrics_of(config) if "total" in line]
    assert line["step"] == 8
    assert {"learning_rate", "tokens_per_second", "agreement_1", "agreement_3"} <= line.keys()
    assert line["tokens_per_second"] > 0


@pytest.mark.parametrize("ended, ends", [(["max_new_tokens", "model"], 1), (["max_new_tokens"], 0)])
def test_an_answer_that_a_limit_cut_has_no_end_token_to_learn(tmp_path, ended, ends):
    """Of two answers the first was cut; where it is unclear which one was, no end token is learnt."""
    tokenizer = byte_tokenizer(CHATML)
    messages = to_messages(["u Hi", "a Hello", "u Bye", "a So long"])
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


def test_a_head_directory_holds_only_its_weights_in_the_targets_dtype(config):
    config = train_to_end(config, dtype="bfloat16", checkpoint_every=1, max_steps=1)
    stored = load_weights(config)
    whole = load_file(checkpoint_of(config, 1) / "model.safetensors")
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in stored.items())  # rounded once
    assert "embed_tokens.weight" not in stored
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    spec = load(config.target, config.out, "chain:3", "topk", dtype="float32")
    assert spec.head.embed_tokens.weight is spec.target.model.get_input_embeddings().weight
    assert len(spec.head.config[TARGET_TOKENS_FIELD]) >= SAMPLE_TOKENS


def test_a_run_writes_a_card_unless_someone_completed_the_old_one(config):
    config = replace(config, max_steps=1)
    card = Path(config.out) / "README.md"
    result = train(config)
    said = card.read_text()
    assert f"--data {config.data} --out {config.out} --recipe published --max-steps 1" in said
    assert f"{config.data}: 19 conversations, " in said
    assert f"{result.agreement[0]:.1%}" in said
    assert "license: FILL IN" in said
    train_to_end(config, max_steps=2)
    assert "2 optimizer steps" in card.read_text()
    card.write_text(card.read_text().replace("FILL IN", "apache-2.0"))
    train_to_end(config, max_steps=3)
    assert "2 optimizer steps" in card.read_text()
    card.unlink()
    train_to_end(config, max_steps=4, license="mit")
    assert "license: mit\n" in card.read_text()


def test_later_draft_steps_are_trained_in_the_second_half(config):
    for growing in (replace(config, unrolled_steps=3), replace(config, head="eagle3")):
        assert [draft_steps_at(growing.hyperparameters, behind) for behind in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 3, 3]
    published = replace(config, head="eagle3", unrolled_steps=7, grow_at=0.0)
    assert draft_steps_at(published.hyperparameters, 0.0) == 7
    assert train(replace(config, unrolled_steps=3, max_steps=4, draft_vocab=20)).positions > 0
