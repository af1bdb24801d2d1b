"""Python files of a model's directory run for --trust-remote-code alone, whatever stands on standard input."""

import io
import json
import sys

import pytest
from models import change, save_model
from refusals import complains
from safetensors.torch import save_file
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from treespec.api.load import load
from treespec.cli import app
from treespec.model.placement import Placement
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({witness!r}).write_text("it ran")

class TrapConfig(LlamaConfig):
    model_type = "trap"

class TrapModel(LlamaForCausalLM):
    config_class = TrapConfig

class TrapTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapModel"}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """(directory of a model that brings code, the file that its code writes), with a `y` on standard input."""
    folder, witness = tmp_path / "trap", tmp_path / "witness"
    save_model(folder)
    (folder / "trap.py").write_text(CODE.format(witness=str(witness)))
    change(folder, model_type="trap", auto_map=AUTO_MAP)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", f"{tmp_path}/modules")
    monkeypatch.setattr(sys, "path", [*sys.path, f"{tmp_path}/modules"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return folder, witness


@pytest.mark.parametrize("start", [Target.load, load], ids=["target", "spec"])
def test_a_models_code_does_not_run_unless_it_is_trusted(trap, start):
    folder, witness = trap
    with complains("--trust-remote-code"):
        start(str(folder))
    assert not witness.exists()


def test_a_models_code_runs_where_it_is_trusted(trap):
    folder, witness = trap
    assert Target.load(str(folder), trust_remote_code=True).trust_remote_code
    assert witness.read_text() == "it ran"


def test_a_draft_models_code_is_trusted_as_the_targets(trap, tmp_path):
    folder, witness = trap
    save_model(tmp_path / "target")
    with complains(r"the draft model.*--trust-remote-code"):
        load(f"{tmp_path}/target", drafter=f"model:{folder}")
    assert not witness.exists()
    load(f"{tmp_path}/target", drafter=f"model:{folder}", trust_remote_code=True)
    assert witness.exists()


def test_a_tokenizers_code_does_not_run_either(trap):
    folder, witness = trap
    change(folder, model_type="llama", auto_map=None)
    auto_map = {"AutoTokenizer": [None, "trap.TrapTokenizer"]}
    change(folder, "tokenizer_config.json", tokenizer_class="TrapTokenizer", auto_map=auto_map)
    with complains("--trust-remote-code"):
        load_tokenizer(str(folder))
    assert not witness.exists()
    assert load_tokenizer(str(folder), Placement(trust_remote_code=True))
    assert witness.exists()


@pytest.mark.parametrize(
    "command",
    [
        "generate --target TRAP --prompt Hello",
        "train --target TRAP --data DATA --out OUT",
        "eval --target TRAP --drafter lookup --out OUT --questions DATA",
        "export --out OUT --head HEAD --to vllm --target TRAP",
        "certify --target TRAP --drafter lookup",
        "skip --target TRAP --out OUT --text DATA",
    ],
)
def test_no_command_asks_standard_input(trap, tmp_path, command):
    folder, witness = trap
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["Hi"], "messages": talk}) + "\n")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    save_file({}, tmp_path / "head" / "model.safetensors")
    places = {"TRAP": folder, "DATA": tmp_path / "data.jsonl", "OUT": tmp_path / "out", "HEAD": tmp_path / "head"}
    arguments = [str(places.get(word, word)) for word in command.split()]
    done = CliRunner().invoke(app, arguments, input="y\ny\ny\n")
    assert not witness.exists()
    assert "--trust-remote-code" in str(done.exception)
    assert "Do you wish to run the custom code" not in done.output
