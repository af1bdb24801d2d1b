"""What a run reads, and what it says of itself."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from accelerate import Accelerator
from commands import complains
from safetensors.torch import load_file
from training import (
    CHATML,
    byte_tokenizer,
    checkpoint_of,
    config_without_files,
    folder_of,
    kill_at,
    load_weights,
    metrics_of,
    to_messages,
    train_to_end,
    train_until_killed,
    with_folder,
)

from treespec.api.load import load
from treespec.draft.auto.cost import CycleCost
from treespec.draft.heads.loading import SAMPLE_TOKENS, TARGET_TOKENS_FIELD, build_new_head
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.target import Target
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.text.entries import Conversation
from treespec.train.checkpoints import Place, find_latest_step
from treespec.train.loop import best
from treespec.train.loop.meter import Meter
from treespec.train.loop.plan import draft_steps_at
from treespec.train.loop.run import Validation, measure_decoded_length, measure_margins
from treespec.train.losses.tokens import Loss
from treespec.train.payoff import compute_chain_price, describe_payoff
from treespec.train.plots import Point, Series, build_axis, draw_figure
from treespec.train.run import train
from treespec.train.verdict import warn_of_rate


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
    lines = [line for line in metrics_of(config) if "acceptance_length" in line]
    assert [line["step"] for line in lines] == [3, 6]
    assert {line["positions"] for line in lines} == {result.positions}


@pytest.fixture
def predict_lengths(monkeypatch):
    """Validations during a run that find these acceptance lengths, one after the other."""

    def set_lengths(*lengths):
        found = iter(lengths)
        monkeypatch.setattr(best, "validate", lambda *_: Validation([0.5], next(found), 10))

    return set_lengths


def test_the_best_validated_head_is_what_out_gets(config, predict_lengths, capsys):
    predict_lengths(2.0, 3.0, 1.5, 1.4)
    train_to_end(config, max_steps=4, validate_every=1, checkpoint_every=1)
    names = ("best", "checkpoint-000003", "checkpoint-000004")
    second, third, last = (load_file(folder_of(config) / name / "model.safetensors") for name in names)
    assert all(torch.equal(value, second[name].to(value.dtype)) for name, value in load_weights(config).items())
    assert load_head(folder_of(config) / "best").kind == "eagle"
    assert not any(torch.equal(second["fc.weight"], later["fc.weight"]) for later in (third, last))
    assert "the head of step 2 was the best, with 3.00 tokens per step predicted" in capsys.readouterr().out


def test_a_run_out_of_patience_ends_and_stays_ended(config, predict_lengths, capsys):
    config = replace(config, max_steps=40, validate_every=1, patience=2)
    predict_lengths(2.0, 1.9, 2.1, 2.0, 1.8)
    train(config, kill_at(50))
    assert "no better head in 2 validations: the run ends (--patience 2)" in capsys.readouterr().out
    assert find_latest_step(folder_of(config)) == 5
    train(config)
    assert "holds this head already" in capsys.readouterr().out
    predict_lengths(2.5, 2.4, 2.3, 2.2)
    train(replace(config, patience=3))
    assert find_latest_step(folder_of(config)) == 9


def test_validations_come_at_fifths_of_a_run_and_not_more_often_than_twenty_steps():
    place = Place()
    steps = []
    for step in range(1, 301):
        place.step = step
        if best.is_validation_due(None, place, step / 300):
            steps.append(step)
            place.validated_step = step
            place.validated_progress = step / 300
            place.best_step = step
    assert steps == [60, 120, 180, 240, 300]
    assert not best.is_validation_due(None, Place(step=4), 0.8)
    assert not best.is_validation_due(None, Place(step=5), 1)


def test_intervals_of_agreement_count_conversations_not_positions():
    """Two conversations that each agree everywhere or nowhere are two observations, however long they are."""
    rows = [torch.ones(50, 1), torch.zeros(50, 1), torch.ones(50, 1), torch.zeros(50, 1)]
    (margin,) = measure_margins(rows)
    assert margin == pytest.approx(3.182 * (1 / 12) ** 0.5, rel=1e-3)
    assert measure_margins(rows[:1]) == []


def test_a_sentence_says_from_where_a_chain_pays_on_this_machine():
    """A forward over two tokens takes 1.1 of one, a draft 0.2: a chain of one pays from 1.3 tokens on."""
    cost = CycleCost(nodes=(1, 2, 6), forward=(1.0, 1.1, 2.0), level=0.2)
    assert compute_chain_price(cost, 1) == pytest.approx(1.3)
    assert describe_payoff(cost, Validation([0.5], 1.5, 100, runs=[0.5])) == (
        "On this machine a chain of 1 drafts commits 1.50 tokens per step and pays: 1.30 is the least"
    )
    assert "1.20 tokens per step and does not pay: 1.30 does" in describe_payoff(
        cost, Validation([0.2], 1.2, 100, runs=[0.2])
    )
    assert describe_payoff(None, Validation([0.2], 1.2, 100, runs=[0.2])) == ""


def test_a_report_draws_what_a_run_measured_in_one_file(config):
    config = replace(config, head="eagle3", unrolled_steps=2, validate_every=3, license="mit")
    result = train(config)
    page = (folder_of(config) / "report.html").read_text()
    assert page.count("<svg") == 6
    assert f"{result.acceptance_length:.2f} tokens" in page
    assert not re.search(r"https?://|<script|<link|refresh", page)
    ElementTree.fromstring(f"<div>{page.partition('<main>')[2].partition('</main>')[0]}</div>")


def test_a_plot_marks_its_values_and_their_intervals_to_scale():
    axis = build_axis([0.0, 10.0], 100, 300)
    assert [axis.place(tick) for tick in axis.list_ticks()] == [100, 140, 180, 220, 260, 300]
    logarithmic = build_axis([0.1, 100.0], 0, 300, may_log=True)
    assert [round(logarithmic.place(tick)) for tick in logarithmic.list_ticks()] == [0, 100, 200, 300]
    svg = draw_figure("share", "step", [Series("held-out", [Point(1, 0.5, 0.1), Point(2, 0.6)], is_line=False)])
    assert svg.count("<circle") == 2
    assert svg.count('class="bar"') == 1
    assert draw_figure("nothing", "step", []) == ""


@pytest.mark.parametrize("rate, words", [(0.0, "keeps its first weights"), (10.0, "is high"), (1e-3, "")])
def test_a_rate_that_learns_nothing_or_too_much_is_told(rate, words):
    lines = warn_of_rate(config_without_files(learning_rate=rate))
    assert bool(lines) == bool(words)
    assert all(words in line for line in lines)


def test_a_vocabulary_of_one_token_is_refused_and_a_poor_one_told(config, capsys):
    with complains("--draft-vocab 1 drafts the same token always"):
        replace(config, draft_vocab=1)
    train_until_killed(replace(config, draft_vocab=4), 1)
    assert re.search(r"few draft tokens: the head never drafts [\d.]+% of the answers", capsys.readouterr().out)


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


def test_runs_over_stored_features_say_whether_a_chain_pays(config, tmp_path, capsys):
    """The first one stores them, and has the whole target for a while; the other one does not."""
    for name, loads in (("first", 1), ("second", 0)):
        train_to_end(with_folder(config, name, features=f"{tmp_path}/features", calibrate=True, draft_vocab=40))
        said = capsys.readouterr().out
        assert said.count("loading the whole target") == loads
        assert "\nOn this machine a chain of " in said
    train_to_end(with_folder(config, "all", features=f"{tmp_path}/features", calibrate=True))
    assert "On this machine" not in capsys.readouterr().out
