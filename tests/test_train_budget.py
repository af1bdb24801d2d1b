"""What a run chooses by its budget, what it says, and that its head is written before it is measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from training import (
    Killed,
    change_json,
    config_without_files,
    folder_of,
    has_drafts,
    read_refusal,
    save_model,
    train_to_end,
    train_until_killed,
    with_folder,
)

from treespec.files.atomic import read_json, write_json
from treespec.heads.checkpoint import load_head
from treespec.kernels.processor import is_bfloat16_fast
from treespec.train import finish, progress
from treespec.train.budget import TrainingSize, choose_recipe, choose_step_conversations, estimate_token_visits
from treespec.train.checkpoints import Place
from treespec.train.data.prepare import Data
from treespec.train.loop.meter import Meter
from treespec.train.loop.steps import count_preparation
from treespec.train.losses.tokens import Loss
from treespec.train.machine import choose_dtype, count_weight_bytes
from treespec.train.record import Validation
from treespec.train.run import train
from treespec.train.verdict import judge_head, warn_of_passes

SIZE = TrainingSize(conversations=147, tokens=95_000, vocab_size=49_152, on_cpu=True)
LEARNS_FAST = {"first_weights": "fitted", "bias": False, "token_weight": 10.0, "draft_vocab": 8192} | {
    "learning_rate": 1e-3,
    "warm_up": 30,
    "batch_size": 2,
    "accumulate": 1,
}


def options_of(config, names):
    return {name: getattr(config, name) for name in names}


def test_a_short_run_takes_the_recipe_that_learns_fast():
    chosen = choose_recipe(config_without_files(recipe=None, minutes=20), SIZE)
    assert options_of(chosen, LEARNS_FAST) == LEARNS_FAST
    assert chosen.recipe == "budget"


def test_a_run_from_a_trained_head_learns_at_a_lower_rate(config):
    train_to_end(config)
    from_head = config_without_files(recipe=None, minutes=20, from_head=config.out)
    assert choose_recipe(from_head, SIZE).learning_rate == 3e-4
    assert choose_recipe(replace(from_head, learning_rate=1e-3), SIZE).learning_rate == 1e-3
    assert choose_recipe(replace(from_head, head="dflash"), SIZE).learning_rate is None


def test_published_and_long_runs_take_the_papers_numbers():
    published = {"first_weights": "random", "bias": True, "token_weight": 0.1, "batch_size": 4}
    nothing = dict.fromkeys(("draft_vocab", "learning_rate", "warm_up", "accumulate"))
    many = replace(SIZE, tokens=5_000_000)
    for options, size in (({"recipe": "published"}, SIZE), ({"recipe": None}, many)):
        chosen = choose_recipe(config_without_files(**options), size)
        assert options_of(chosen, published | nothing) == published | nothing
        assert chosen.hyperparameters == chosen.training.recipe
        assert chosen.count_forwards(1) == 1
    assert choose_recipe(config_without_files(recipe="budget"), many).learning_rate == 1e-3


def test_options_that_are_set_win_over_the_budget():
    told = {"first_weights": "random", "bias": True, "learning_rate": 0.0, "draft_vocab": 0, "batch_size": 8}
    chosen = choose_recipe(config_without_files(recipe=None, **told), SIZE)
    assert options_of(chosen, told) == told
    assert chosen.token_weight == 10


def test_a_step_takes_more_conversations_as_the_budget_grows():
    sizes = [choose_step_conversations(visits) for visits in (1, 640_000, 8_000_000, 64_000_000)]
    assert sizes == [2, 2, 8, 32]
    config = config_without_files(recipe=None, epochs=1)
    for processes in (1, 2, 4):
        size = replace(SIZE, tokens=64_000_000, conversations=100_000, processes=processes)
        chosen = choose_recipe(config, size)
        assert chosen.batch_size * chosen.accumulate * processes == 32


def test_the_budget_is_that_of_what_ends_the_run_first():
    config = config_without_files(recipe=None, epochs=3)
    assert estimate_token_visits(config, SIZE) == 285_000
    assert estimate_token_visits(replace(config, minutes=1.0), SIZE) == 30_000
    assert estimate_token_visits(replace(config, minutes=1.0), replace(SIZE, on_cpu=False)) == 285_000
    assert estimate_token_visits(replace(config, max_steps=147), SIZE) == 380_000


def test_a_run_by_its_budget_goes_on_with_more_steps(config):
    config = replace(config, recipe=None, **dict.fromkeys(LEARNS_FAST))
    train_until_killed(config)
    longer = train_to_end(config, max_steps=8)
    assert "Recipe budget. 8 optimizer steps" in Path(longer.out, "README.md").read_text()
    assert load_head(longer.out).fc.bias is None
    assert "holds a run with batch_size = 2, not 4" in read_refusal(longer, recipe="published")
    further = train_to_end(with_folder(config, "on"), from_head=longer.out)
    assert load_head(further.out).fc.bias is None


def test_a_run_of_an_earlier_version_keeps_the_published_recipe(config):
    train_until_killed(config)
    record = read_json(folder_of(config) / "config.json", "")
    del record["recipe"]
    write_json(folder_of(config) / "config.json", record)
    train_to_end(config, recipe=None)


def test_the_head_is_there_before_it_is_measured(config, monkeypatch, capsys):
    def end(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(finish, "measure_head", end)
        with pytest.raises(Killed):
            train(config)
    assert f"{config.out} has the head" in capsys.readouterr().out
    assert "not validated: the run did not come to its end" in Path(config.out, "README.md").read_text()
    assert load_head(config.out).kind == "eagle"
    assert train(replace(config, calibrate=True)).positions > 0
    assert has_drafts(config, dtype="float32")


def test_validation_and_calibration_end_when_their_time_is_over(config, monkeypatch, capsys):
    whole = train(with_folder(config, "whole"))
    monkeypatch.setattr(progress, "MIN_END_SECONDS", 0.0)
    short = train(replace(config, calibrate=True, decode_on=2))
    assert 0 < short.positions < whole.positions
    printed = capsys.readouterr().out
    assert "held-out conversations: the time is up" in printed
    assert "calibrating the head for --tree auto, on one conversation, as validation took the time" in printed
    assert has_drafts(config, dtype="float32")


def test_a_run_ends_with_what_it_wrote_a_verdict_and_the_next_command(config, capsys):
    train_until_killed(config)
    capsys.readouterr()
    train(config)
    lines = capsys.readouterr().out.splitlines()
    assert "going on from step 2" in lines
    assert any(line.startswith("few data: ") for line in lines)
    written, verdict, following = lines[-3:]
    assert written.startswith(f"Wrote {config.out}: a head of kind eagle after 6 steps")
    assert "tokens per step predicted: this head will not speed up decoding (1.5 or more is good)" in verdict
    assert following == f"Next: treespec regenerate --target {config.target} --data sharegpt --out answers"


def test_a_verdict_follows_the_predicted_chain():
    config = config_without_files()
    data = Data([], [None], None)
    verdicts = [judge_head(config, data, Validation([0.5], length, 1000)) for length in (1.05, 1.47, 1.5)]
    assert [verdict.partition(":")[0] for verdict in verdicts] == ["Not good", "Not good yet", "Good"]
    assert judge_head(config, data, Validation([0.5], 1.7, 10)).startswith(
        "Not judged: 1.70 tokens per step predicted, on 10"
    )
    nothing = Validation([], 1.0, 0)
    assert judge_head(replace(config, validate_on=0), data, nothing) == "Not validated (--validate-on 0)"
    assert judge_head(config, data, nothing) == "Not validated: no held-out conversation is long enough"
    assert judge_head(config, Data([], [], None), nothing) == "Not validated: no conversation is held out"


def test_many_passes_over_the_same_text_are_told():
    assert warn_of_passes(10.0) == []
    (line,) = warn_of_passes(30.2)
    assert "sees each text 30 times" in line


@pytest.mark.parametrize(
    "losses, comment", [([149_986_048.0], "very large"), ([1.0, 5.0], "has risen from 1.000"), ([9.0, 8.0], "")]
)
def test_a_loss_that_is_huge_or_rises_gets_a_comment(losses, comment, tmp_path, capsys):
    meter = Meter(Accelerator(cpu=True), tmp_path / "metrics.jsonl", Place())
    for step, loss in enumerate(losses + losses, start=1):
        meter.count([Loss(torch.tensor(loss), {"tokens": torch.tensor(1.0)})])
        meter.write_line(step, float(step), 0.5, 0.1)
    said = capsys.readouterr().out
    assert said.count("lower --learning-rate") == bool(comment)
    assert comment in said


def test_a_loss_that_rises_because_further_draft_steps_begin_gets_none(tmp_path, capsys):
    meter = Meter(Accelerator(cpu=True), tmp_path / "metrics.jsonl", Place())
    for step, (loss, parts) in enumerate([(1.0, ["first"]), (9.0, ["first", "second"]), (8.0, ["first", "second"])]):
        meter.count([Loss(torch.tensor(loss), dict.fromkeys(["tokens", *parts], torch.tensor(1.0)))])
        meter.write_line(step, 1.0 + step, 0.5, 0.1)
    assert "lower" not in capsys.readouterr().out


def test_minutes_count_the_preparation_up_to_a_half():
    assert count_preparation(20, 300.0) == 300
    assert count_preparation(20, 3000.0) == 600
    assert count_preparation(0, 300.0) == 0


def test_storing_features_says_how_far_it_is(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    train_until_killed(replace(config, features=f"{tmp_path}/features"), 1)
    assert "tokens, about 0 s left" in capsys.readouterr().out.partition("storing features: ")[2]


def test_a_cpu_without_bfloat16_trains_beside_a_target_in_float32(config, tmp_path):
    folder = save_model(tmp_path / "model")
    change_json(folder, dtype="bfloat16")
    assert count_weight_bytes(str(folder)) == (folder / "model.safetensors").stat().st_size
    chosen = choose_dtype(replace(config, target=str(folder), dtype="auto"))
    assert chosen == ("auto" if is_bfloat16_fast() or torch.accelerator.is_available() else "float32")
    assert choose_dtype(replace(config, target=str(folder), dtype="bfloat16")) == "bfloat16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
