"""Two processes train a head and evaluate it as one does: in one file, so that both are forked from one server."""

import json
import os
import runpy
import socket
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import QUESTIONS, complains, config_in, options_in, page_of, shorten_measurements, words_of
from models import MODELS, random_model, same_weights, tiny
from safetensors.torch import load_file
from training import checkpoint_of, read_refusal, train_to_end

from treespec.eval.benchmark import evaluate
from treespec.eval.ledger import Ledger
from treespec.files.atomic import read_json
from treespec.train.sharding import shard_layers

TURNS = sum(len(question["turns"]) for question in QUESTIONS)


FORKED = get_context("forkserver")  # it imports these once, and has no threads
FORKED.set_forkserver_preload(["treespec.train.run", "treespec.eval.benchmark"])


def run_rank(number, ports, lines, said):
    """Run `python -m LINE` as one of two, one line after another, with standard output in a file."""
    shorten_measurements()
    with said.open("w") as out, redirect_stdout(out):
        for port, line in zip(ports, lines, strict=True):
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            os.environ |= {"WORLD_SIZE": "2", "RANK": f"{number}", "LOCAL_RANK": f"{number}"}
            sys.argv[:] = line.split()
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            assert not ended.value.code
            AcceleratorState._reset_state(reset_partial_state=True)


def find_free_ports(count):
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def run_by_two(lines, folder):
    """What each of two processes prints that run `python -m LINE` for each line. folder: for what they print."""
    files = [folder / f"said-{number}" for number in (0, 1)]
    ports = find_free_ports(len(lines))
    ranks = []
    for number, file in enumerate(files):
        ranks.append(FORKED.Process(target=run_rank, args=(number, ports, lines, file), daemon=True))
        ranks[-1].start()
    for one in ranks:
        one.join(120)
    assert [one.exitcode for one in ranks] == [0, 0]
    return [file.read_text() for file in files]


def write_unequal_data(file, count=24):
    """Conversations whose answers have 1 to 9 words."""
    lines = []
    for i in range(count):
        turns = [{"from": "human", "value": f"question {i:03}"}, {"from": "gpt", "value": "answer " * (1 + i * 5 % 9)}]
        lines.append(json.dumps({"conversations": turns}))
    file.write_text("\n".join(lines))
    return file


def test_two_processes_train_the_head_of_one_with_twice_the_batch(config, tmp_path):
    """Answers of 1 to 9 words, and no noise: the loss is the mean over the tokens of all processes. float32, 1e-6.

    With features that are stored, and then with a divided target, whose features are stored or computed.
    """
    data = write_unequal_data(tmp_path / "unequal.jsonl")
    one = train_to_end(config, data=str(data), noise=0.0, batch_size=4, max_steps=4, validate_on=2, validate_every=2)
    options = f"--target {config.target} --data {data} --dtype float32 --max-steps 4 --batch-size 2"
    options += " --warm-up 2 --learning-rate 1e-3 --noise 0 --held-out 0.2 --validate-every 2"
    options += " --validate-on 2 --mixed-precision no --calibrate --recipe published"
    ways = {
        "stored": f"--features {tmp_path}/features",
        "divided": f"--features {tmp_path}/divided-features --shard-target",
        "divided-online": "--shard-target",
    }
    lines = [f"treespec.train {options} --out {tmp_path / name} {more}" for name, more in ways.items()]
    said = run_by_two(lines, tmp_path)
    assert said[0].startswith("processes: 2, on cpu:0, mixed precision: no\n")
    assert said[0].count("loading the whole target") == 2  # to store its features
    assert said[0].count("the target's layers are divided over 2 processes") == 2
    assert said[0].count("the best head so far") >= 3
    weights = load_file(checkpoint_of(one, 4) / "model.safetensors")
    for name in ways:
        ours = load_file(tmp_path / name / "training" / "checkpoint-000004" / "model.safetensors")
        for weight, value in weights.items():
            assert torch.allclose(value, ours[weight], rtol=0, atol=1e-6), (name, weight)
        assert (tmp_path / name / "calibration.json").exists()
    files = sorted(tmp_path.glob("features/**/*.safetensors"))
    assert len(files) == 2  # of the conversations to train on, and of the held-out ones
    for file in files:
        divided = tmp_path / "divided-features" / file.relative_to(tmp_path / "features")
        assert same_weights(load_file(file), load_file(divided))


def test_processes_share_the_questions_and_report_all_but_times(home, tmp_path):
    """As `accelerate launch` starts them."""
    out = tmp_path / "out"
    options = options_in(home, out, verifier="topk", max_new_tokens=4, warm_up=0)
    said = run_by_two([" ".join(["treespec", "eval", *words_of(options)])], tmp_path)
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


def test_a_divided_target_needs_several_processes_and_nothing_that_needs_it_whole(config):
    assert read_refusal(config, shard_target=True).startswith(
        "--shard-target divides the target over several processes"
    )
    for name, value in {"device_map": "auto", "load_in": "8bit", "decode_on": 2}.items():
        with complains(f"--{name.replace('_', '-')} "):
            replace(config, shard_target=True, **{name: value})


def test_recurrent_layers_are_not_divided():
    with complains("--shard-target: Lfm2ForCausalLM has recurrent layers"):
        shard_layers(random_model(tiny(MODELS["lfm2"])), None)
