"""Two processes train a head and evaluate it as one does: in one file, so that both are forked from one server."""

import json

import torch
from commands import QUESTIONS, complains, config_in, options_in, page_of, run_by_two, words_of
from safetensors.torch import load_file
from training import checkpoint_of, train_to_end

from treespec.eval.benchmark import evaluate
from treespec.eval.ledger import Ledger
from treespec.files.atomic import read_json

TURNS = sum(len(question["turns"]) for question in QUESTIONS)


def write_unequal_data(file, count=24):
    """Conversations whose answers have 1 to 9 words."""
    lines = []
    for i in range(count):
        turns = [{"from": "human", "value": f"question {i:03}"}, {"from": "gpt", "value": "answer " * (1 + i * 5 % 9)}]
        lines.append(json.dumps({"conversations": turns}))
    file.write_text("\n".join(lines))
    return file


def test_two_processes_train_the_head_of_one_with_twice_the_batch(config, tmp_path):
    """Answers of 1 to 9 words, and no noise: the loss is the mean over the tokens of all processes. float32, 1e-6."""
    data = write_unequal_data(tmp_path / "unequal.jsonl")
    one = train_to_end(config, data=str(data), noise=0.0, batch_size=4, max_steps=4, validate_on=2, validate_every=2)
    two = tmp_path / "two"
    options = f"--target {config.target} --data {data} --out {two} --dtype float32 --max-steps 4 --batch-size 2"
    options += " --warm-up 2 --learning-rate 1e-3 --noise 0 --held-out 0.2 --validate-every 2"
    options += f" --validate-on 2 --mixed-precision no --calibrate --features {tmp_path}/features"
    options += " --recipe published"
    said = run_by_two(f"treespec.train {options}", tmp_path)
    assert said[0].startswith("processes: 2, on cpu:0, mixed precision: no\n")
    assert said[0].count("loading the whole target") == 1  # to store its features
    assert "the best head so far" in said[0]
    ours = load_file(two / "training" / "checkpoint-000004" / "model.safetensors")
    for name, value in load_file(checkpoint_of(one, 4) / "model.safetensors").items():
        assert torch.allclose(value, ours[name], rtol=0, atol=1e-6), name
    assert (two / "calibration.json").exists()


def test_processes_share_the_questions_and_report_all_but_times(home, tmp_path):
    """As `accelerate launch` starts them."""
    out = tmp_path / "out"
    options = options_in(home, out, verifier="topk", max_new_tokens=4, warm_up=0)
    said = run_by_two(" ".join(["treespec", "eval", *words_of(options)]), tmp_path)
    assert said == [(out / "report.md").read_text(), ""]
    asked = [{e["question_id"] for e in Ledger(out, rank).entries if e["kind"] == "completion"} for rank in range(2)]
    assert asked[1] == {"b"}
    _, row = read_json(out / "report.json", "")["rows"]
    assert (row["same"], row["turns"]) == (TURNS, TURNS)
    assert row["overall"]["acceptance_length"]["value"] >= 1
    assert row["overall"]["tokens_per_second"]["value"] is None
    assert "tokens/s" not in page_of(out / "report.md").partition("- Target")[0]
    with complains("processes was 2, now 1"):
        evaluate(config_in(home, out, verifier="topk", max_new_tokens=4, warm_up=0))
