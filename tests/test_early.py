"""What is wrong with the names, files and options of a command is said in a line before torch loads."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import TerminalText, to_command, treespec
from models import random_eagle3, random_head, target
from safetensors.torch import load_file, save_file
from training import save_model

from treespec.draft.heads.loading import build_new_head
from treespec.draft.pairing import describe_draft_model
from treespec.draft.spec import DrafterSpec
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.registry import count_folder_levels


def hollow_model(folder):
    """As `save_model`, with a file of weights that holds none: loading it is an error."""
    save_file({}, save_model(folder) / "model.safetensors")
    return folder


NEEDS = """
generate: --prompt x
chat:
trace: --prompt x --head HOME/eagle
serve:
eval: --out HOME/out
certify: --out HOME/out.json
acceptance: --out HOME/out --head HOME/eagle
tau: --out HOME/out --head HOME/eagle
calibrate: --head HOME/eagle
tree: --out HOME/tree.json --head HOME/eagle
skip-search: --out HOME/skip.json
train: --out HOME/out --data HOME/talk.jsonl
regenerate: --out HOME/out --data HOME/talk.jsonl
export: --out HOME/out --head HOME/eagle --to vllm
datastore build: --out HOME/out --data HOME/talk.jsonl
"""
# Commands, their options, and words of the only line.
WRONG = Path(__file__).with_name("early.txt").read_text()
NEEDED = dict(line.split(":") for line in NEEDS.strip().splitlines())  # a command, and what it needs beside a target
GROUPS = {
    "EVERY": ", ".join(NEEDED),
    "DRAFTING": "generate, chat, serve, eval, certify, regenerate",
    "HEADS": "generate, eval, acceptance, calibrate, tree, export",
    "OUT": ", ".join(name for name, needs in NEEDED.items() if "--out" in needs),
}
ROWS = re.findall(r"^([^#].*?): (.*) -> (.*)$", WRONG, re.MULTILINE)
LINES = [
    (name, options, words)
    for names, options, words in ROWS
    for group in names.split(", ")
    for name in GROUPS.get(group, group).split(", ")
]


# Runs command lines one after the other where torch and transformers cannot be imported.
def run_lines_without_torch() -> None:
    """Read command lines as JSON, print [exit code, standard error] of each; importing torch is an error."""
    import contextlib
    import io
    import json
    import sys

    from typer.main import get_command

    from treespec.cli import app, run

    class Guard:
        def find_spec(self, name, *_):
            assert name not in ("torch", "transformers"), f"{name} is imported"

    command = get_command(app)
    sys.meta_path.insert(0, Guard())
    answers = []
    for line in json.load(sys.stdin):
        with contextlib.redirect_stderr(io.StringIO()) as error:
            answers.append([run(command, line), error.getvalue()])
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Heads, data, and targets whose loading would be another error."""
    folder = tmp_path_factory.mktemp("early")
    hollow_model(folder / "target")
    for name, file, content in [
        ("cut-config", "config.json", '{"model_type'),
        ("cut-weights", "model.safetensors", "half"),
        ("cut-words", "tokenizer.json", '{"model'),
        ("other-words", "tokenizer.json", "{}"),
    ]:
        shutil.copytree(folder / "target", folder / name)
        (folder / name / file).write_text(content)
    for name, left_out in [("no-weights", "model.s*"), ("no-words", "token*"), ("no-chats", "*chat_template*")]:
        shutil.copytree(folder / "target", folder / name)
        for file in (folder / name).glob(left_out):
            file.unlink()
    loaded = target("llama")
    heads = {"eagle": random_head(loaded), "eagle3": random_eagle3(loaded)}
    depths = {"medusa": 4, "hydra": 3, "hydra++": 3}
    heads |= {kind: build_new_head(kind, loaded, heads=heads) for kind, heads in depths.items()}
    for name, head in heads.items():
        save_head(head, folder / name)
    for name, file, content in [
        ("cut-head", "model.safetensors", "half"),
        ("wide", "config.json", '{"hidden_size": 4096}'),
        ("uncalibrated", "calibration.json", '{"format": 2, "sizes": {}}'),
    ]:
        shutil.copytree(folder / "eagle", folder / name)
        (folder / name / file).write_text(content)
    for name in ("empty", "store", "memory"):
        (folder / name).mkdir(parents=True)
    for name, content in {
        "deep.json": json.dumps({"layers": 99, "attention": [], "mlp": []}),
        "memory/shared.safetensors": "half\nhalf\n",
        "talk.jsonl": json.dumps({"data": ["the user", "asks"]}),
        "words.jsonl": "the user asks",
        "notes.txt": "Some notes.\nOf two lines.\n",
        "deep.jsonl": '{"messages": ' + "[" * 100_000,
        "cut.jsonl.gz": "\x1f\x8b\x08\0",
        "bytes.txt": "\xff\xfe",
        "bracket.txt": "([\n",
    }.items():
        (folder / name).write_text(content, "latin-1")
    return folder


@pytest.fixture(scope="module")
def said(wrong):
    """(exit code, standard error) of each line, by its command and options."""
    lines = []
    for command, options, _ in LINES:
        named = f"{command} --target HOME/target {NEEDED[command]} {options}".split()
        if command in ("eval", "certify") and "--head" not in options and "--drafter" not in options:
            named += ["--drafter", "suffix"]
        lines.append([word.replace("HOME", str(wrong)) for word in named])
    done = subprocess.run(
        to_command(run_lines_without_torch),
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)
    return {line[:2]: (code, text) for line, (code, text) in zip(LINES, results, strict=True)}


@pytest.mark.parametrize("command, options, words", LINES, ids=lambda part: part[:40])
def test_it_is_refused_in_a_line_and_torch_is_not_imported(wrong, said, command, options, words):
    code, text = said[command, options]
    assert code == 2, text
    assert text.startswith("treespec: ")
    assert text.count("\n") == 1
    assert any(one.replace("HOME", str(wrong)) in text for one in words.split("|")), text


def test_a_folder_may_have_an_at_sign_and_finished_evaluations_load_nothing(home, tmp_path, monkeypatch, capsys):
    head = shutil.copytree(home / "head", tmp_path / "head@2x4")
    options = "--max-new-tokens 3 --limit 1 --turns 1 --warm-up 0"
    line = f"eval --target {home}/target --head {head} --out {tmp_path}/out {options}"
    assert treespec(line) == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [(row["drafter"], row["tree"]) for row in rows if row["drafter"]] == [(f"head:{head}", None)]

    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert treespec(line) == 0  # finished: nothing is loaded, and nothing says so
    assert f"reading {tmp_path}/out" in terminal.getvalue()
    assert "loading" not in terminal.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        "--head HOME/medusa --tree chain:4",
        "--head HOME/medusa --verifier rrs-wo",
        "--head HOME/eagle3 --tree chain:9",
        "--drafter suffix:tokens=5 --verifier topk",
        "--drafter model:a",
    ],
)
def test_what_goes_together_is_loaded(wrong, capsys, options):
    """The target's missing weights are the error."""
    line = f"generate --target HOME/target --prompt x {options}".replace("HOME", str(wrong))
    assert treespec(line) == 2
    assert "treespec: cannot load the target" in capsys.readouterr().err


def test_levels_by_names_are_those_of_the_loaded_head(wrong, tmp_path):
    """Published configurations of Medusa say fewer heads than their files hold."""
    for name in ("eagle", "eagle3", "medusa", "hydra"):
        assert count_folder_levels(wrong / name) == load_head(wrong / name).max_depth
    for config in ('{"medusa_num_heads": 2}', "{}", '{"medusa_num_heads": 2, "checksum_": null}'):
        tensors = load_file(wrong / "medusa" / "model.safetensors")
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(config)
        assert count_folder_levels(tmp_path) == load_head(tmp_path).max_depth == 4


def test_what_only_reading_tells_is_left_to_the_loading(wrong, tmp_path):
    torch.save(load_file(wrong / "medusa" / "model.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    assert count_folder_levels(tmp_path) is None
    assert describe_draft_model(DrafterSpec.parse("head:someone/on-the-hub")).at_once
