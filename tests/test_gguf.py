"""Targets that take more than weights to load: a GGUF file, and Python files of a directory."""

import io
import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from commands import complains
from head_files import write_gguf
from models import random_head, target
from training import change_json, save_model, small_run, write_data
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from treespec.api.load import load
from treespec.cli import app
from treespec.heads.checkpoint import save_head
from treespec.model.identity import identify_target
from treespec.model.placement import Placement
from treespec.model.quantization.gguf import share_gguf_reader, warn_of_rotary_factors
from treespec.model.target import Target
from treespec.model.tokenizers import load_tokenizer
from treespec.model.weights import load_config, load_model
from treespec.train.run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plain Llama beside a file of it, `tiny.gguf`, whose rows llama.cpp reordered."""
    place = save_model(
        tmp_path_factory.mktemp("gguf") / "target", hidden_size=64, intermediate_size=96, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(place), place / "tiny.gguf")
    return place


def loaded(folder, file="tiny.gguf", dtype="float32"):
    return Target.load(str(folder), how=Placement(f"gguf:{file}"), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_has_the_weights_that_transformers_unpacks(dtype, folder):
    """Packed products show theirs in float32."""
    options = {"gguf_file": "tiny.gguf", "dtype": getattr(torch, dtype)}
    state = loaded(folder, dtype=dtype).model.state_dict()
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, **options)
    for name, weight in plain.state_dict().items():
        assert torch.equal(state[name].to(weight.dtype), weight)
        assert state[name].dtype in (torch.float32, weight.dtype)


def test_a_file_loads_without_bars_and_transformers_own_stay(folder, capfd):
    loaded(folder)
    assert capfd.readouterr() == ("", "")
    hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
    assert "GGUF tensors" in capfd.readouterr().err


def test_config_and_weights_of_a_file_share_one_parse(folder, tmp_path, monkeypatch):
    """Also where the folder has no other file, so that the config is the file's."""
    shutil.copy(folder / "tiny.gguf", tmp_path)
    parsed = []

    class CountingReader(gguf.GGUFReader):
        def __init__(self, path, *options):
            parsed.append(path)
            super().__init__(path, *options)

    monkeypatch.setattr(gguf, "GGUFReader", CountingReader)
    placement = Placement("gguf:tiny.gguf")
    with share_gguf_reader(placement):
        config = load_config(str(tmp_path), placement)
        load_model(str(tmp_path), placement)
    assert config.hidden_size == 64
    assert len(parsed) == 1
    assert gguf.GGUFReader is CountingReader


def test_a_head_trains_on_a_file_and_on_features_that_it_stored(folder, tmp_path):
    """Features know the form of the target that they come from."""
    data = write_data(tmp_path / "data.jsonl")
    features = f"{tmp_path}/features"
    stored = small_run(folder, data, tmp_path / "b", load_in="gguf:tiny.gguf", max_steps=2, features=features)
    whole = small_run(folder, data, tmp_path / "a", load_in="gguf:tiny.gguf", max_steps=2)
    for config in (whole, stored):
        train(config)
        assert load(str(folder), config.out, "2x2", load_in="gguf:tiny.gguf").generate([3, 9], max_new_tokens=4)
    train(small_run(folder, data, tmp_path / "c", max_steps=2, features=features))
    assert len(list(Path(features).iterdir())) == 2  # one for each form


def test_rotary_factors_that_the_config_lacks_are_told(folder, caplog):
    """transformers reads none from a file. A config.json that has them is the model's own."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    write_gguf(model, folder / "scaled.gguf", factors=np.full(16, 8.0, dtype=np.float32))
    loaded(folder)
    assert "rotary" not in caplog.text
    loaded(folder, "scaled.gguf")
    assert "scaled.gguf scales its rotary positions, and the config read for it does not" in caplog.text
    caplog.clear()
    model.config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    warn_of_rotary_factors(folder / "scaled.gguf", model.config)
    assert not caplog.text


def test_an_identity_follows_the_weights_of_the_file(folder, tmp_path):
    variant = Placement("gguf:tiny.gguf")
    before = identify_target(str(folder), variant)
    assert before != identify_target(str(folder))
    assert before == identify_target(str(folder), Placement(f"gguf:{folder / 'tiny.gguf'}"))
    content = bytearray((folder / "tiny.gguf").read_bytes())
    content[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    assert before != identify_target(str(folder), Placement(f"gguf:{tmp_path / 'other.gguf'}"))


def test_what_is_no_gguf_file_is_told_in_a_line(folder):
    (folder / "none.gguf").write_text("hello")
    (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    for file, told in (
        ("none.gguf", "is no GGUF file"),
        ("broken.gguf", "cannot load the target"),
    ):
        with complains(told):
            loaded(folder, file)
    with complains("name its folder, and the file by --load-in gguf:FILE"):
        load(f"{folder}/tiny.gguf")


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
    folder = tmp_path / "trap"
    witness = tmp_path / "witness"
    save_model(folder)
    (folder / "trap.py").write_text(CODE.format(witness=str(witness)))
    change_json(folder, model_type="trap", auto_map=AUTO_MAP)
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
    change_json(folder, model_type="llama", auto_map=None)
    auto_map = {"AutoTokenizer": [None, "trap.TrapTokenizer"]}
    change_json(folder, "tokenizer_config.json", tokenizer_class="TrapTokenizer", auto_map=auto_map)
    with complains("--trust-remote-code"):
        load_tokenizer(str(folder))
    assert not witness.exists()
    assert load_tokenizer(str(folder), Placement(trust_remote_code=True))
    assert witness.exists()


@pytest.mark.parametrize(
    "command",
    [
        "generate --target TRAP --prompt Hello",
        "train --target TRAP --data DATA --out OUT --mixed-precision no",
        "eval --target TRAP --drafter suffix --out OUT --questions DATA",
        "export --out OUT --head HEAD --to vllm --target TRAP",
        "certify --target TRAP --drafter suffix",
    ],
)
def test_no_command_asks_standard_input(trap, tmp_path, command):
    folder, witness = trap
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["Hi"], "messages": talk}) + "\n")
    head = tmp_path / "head"
    save_head(random_head(target("llama")), head)
    places = {"TRAP": folder, "DATA": tmp_path / "data.jsonl", "OUT": tmp_path / "out", "HEAD": head}
    arguments = [str(places.get(word, word)) for word in command.split()]
    done = CliRunner().invoke(app, arguments, input="y\ny\ny\n")
    assert not witness.exists()
    assert "--trust-remote-code" in str(done.exception)
    assert "Do you wish to run the custom code" not in done.output
