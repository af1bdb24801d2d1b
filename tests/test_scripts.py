"""Every script of docs/scripts runs, on models so small that a figure says nothing."""

import json
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from evaluating import save_models

SCRIPTS = Path(__file__).parent.parent / "docs" / "scripts"
ARGUMENTS = {  # script: its arguments, and a word of what it prints; others are asked for --help
    "clock_noise": (
        "target questions.jsonl --evaluations 1 --most 2 --max-new-tokens 2 --busy 1",
        "0 of 1 evaluations",
    ),
    "dtypes": ("target --nodes 1 2 --rounds 1", "| float32 | plain |"),
    "draft_vocabulary": ("target questions.jsonl head --limit 1 --max-new-tokens 4 --steps 2", "ms a token"),
    "loss_memory": ("--kinds medusa --losses tv --vocabulary 64 --texts 1 --length 8", "| `tv` |"),
    "feature_bits": ("target questions.jsonl --tokens 40 --length 20", "| 8 bits, a scale for 64 values |"),
    "long_context": ("target head 32 --max-new-tokens 4", "verify"),
    "node_cost": ("--vocabularies 64 --rows 2 --draws 3 --rounds 2", "| 64 | 2 | 3 |"),
    "packed_products": ("--weights 1 --rounds 1", "packed"),
    "pages": ("--check", ""),
    "paired_difference": ("one.jsonl other.jsonl", "+100%"),
    "picture": ("target head Hello --max-new-tokens 4 --out chat.svg", "wrote chat.svg"),
    "quantised": ("--target target --head head --forms none --rounds 1 --max-new-tokens 4", "| `none` | float32 |"),
    "recurrent_costs": ("--kinds lfm2 --rounds 1 --context 4", "| lfm2 |"),
    "request_costs": ("target head --tokens 4 --rounds 1", "| a transformers processor |"),
    "structured": ("target head --rounds 1 --tasks 1 --max-new-tokens 6", "| trees and forced tokens |"),
    "training_costs": ("target --texts 2 --length 8 --loss-vocab 16 --rounds 1", "`--loss-vocab 16`"),
    "training_memory": ("--length 16 --width 512", "| eagle3 | `--features`, made |"),
    "training_profile": ("target --kinds eagle3 --texts 1 --length 8 --rounds 1", "| eagle3 | stored |"),
    "verify_large": ("--vocabulary 64 --rounds 1", "| `layer:greedy` |"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What scripts read: a pair, questions, and answers to them."""
    folder = tmp_path_factory.mktemp("scripts")
    save_models(folder)
    for name, cycles in (("one", 5), ("other", 10)):
        counts = {"new_tokens": [20], "decoding_steps": [cycles]}
        lines = [json.dumps({"question_id": number, "choices": [counts]}) for number in range(3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def run(script):
    """As `python script` does; argparse leaves --help by SystemExit."""
    with suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", sorted(file.stem for file in SCRIPTS.glob("*.py")))
def test_the_script_runs(name, folder, monkeypatch, capsys):
    arguments, shown = ARGUMENTS.get(name, ("--help", "usage:"))
    threads = torch.get_num_threads()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    try:
        run(SCRIPTS / f"{name}.py")
    finally:
        torch.set_num_threads(threads)
    assert shown in capsys.readouterr().out
