"""What is wrong with the files and names of a command is said before a target is loaded, by every command."""

import json
import shutil
import sys

import pytest
from models import CONFIGS, random_head, save_model, target
from test_command_line import Terminal
from test_pairing import refused

from treespec.cli import main
from treespec.cli.config import begin
from treespec.draft.trained.eagle import new_head
from treespec.draft.trained.hydra import new_hydra, new_hydra_plus
from treespec.draft.trained.medusa import new_medusa
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.options import DTYPES
from treespec.shared_options import ModelOptions
from treespec.target import Target

PROMPT = ["--prompt", "x"]
PLACES = {  # commands, and what each needs beside a target
    "generate": PROMPT,
    "chat": [],
    "certify": ["--out", "HOME/out.json"],
    "eval": ["--out", "HOME/out"],
    "bench": ["--out", "HOME/out"],
}
FITS = {
    "acceptance": ["--out", "HOME/out"],
    "calibrate": [],
    "tree": ["--out", "HOME/tree.json"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Heads, skip sets, and a target that has a configuration but no weights: loading it is another error."""
    folder = tmp_path_factory.mktemp("early")
    CONFIGS["llama"]().save_pretrained(folder / "target")
    loaded = target("llama")
    save_head(random_head(loaded), folder / "eagle")
    save_head(new_medusa(loaded, 4), folder / "medusa")
    save_head(new_hydra(loaded, 3), folder / "hydra")
    save_head(new_hydra_plus(loaded, 3), folder / "hydra++")
    shutil.copytree(folder / "eagle", folder / "damaged")
    (folder / "damaged" / "calibration.json").write_text('{"sizes": {}}')
    (folder / "skip.json").write_text("{damaged")
    (folder / "memory" / "shared").mkdir(parents=True)
    (folder / "memory" / "shared" / "000001.safetensors").write_bytes(b"half")
    (folder / "deep.json").write_text(json.dumps({"layers": 99, "attention": [], "mlp": []}))
    return folder


@pytest.mark.parametrize("command", PLACES)
def test_files_of_a_drafter_are_looked_at_first(home, monkeypatch, capsys, command):
    for options, words in [
        (["--drafter", "medusa:HOME/eagle"], "eagle is a head of kind eagle: write eagle:"),
        (["--drafter", "hydra:HOME/hydra++"], "is a head of kind hydra++: write hydra++:"),
        (["--drafter", "eagle:HOME/medusa"], "is a head of kind medusa: write medusa:"),
        (["--head", "HOME/damaged"], "calibration.json is not understood: make it again with treespec calibrate"),
        (["--drafter", "self:HOME/skip.json"], "skip.json is damaged, it is not JSON"),
        (["--drafter", "self:HOME/deep.json"], "is for 99 layers, the target has"),
        (["--drafter", "mtp:2"], "mtp takes no value"),
        (["--drafter", "suffix+mtp"], "reads the target's own safetensors files"),
        (["--drafter", "suffix:HOME/memory"], "000001.safetensors is damaged: delete it to forget its answers"),
        (["--drafter", "suffix:HOME/memory,nodes=9+eagle:HOME/eagle"], "000001.safetensors is damaged"),
        (["--drafter", "suffix+egle:HOME/eagle"], "did you mean eagle?"),
        (["--drafter", "suffix:HOME/memory+egle:HOME/eagle"], "unknown drafter 'egle' (did you mean eagle?)"),
        (["--drafter", "suffix:HOME/skip.json"], "skip.json is a file: name a folder"),
        (["--drafter", "lookup:ngram=0"], "ngram is 0, must be"),
    ]:
        (line,) = refused(home, monkeypatch, capsys, command, *options, *PLACES[command])
        assert words in line


@pytest.mark.parametrize("command", [*PLACES, *FITS])
def test_a_template_that_there_is_not_is_found_first(home, monkeypatch, capsys, command):
    options = ["--head", "HOME/eagle", "--template", "vicunna", *(PLACES | FITS)[command]]
    (line,) = refused(home, monkeypatch, capsys, command, *options)
    assert "no fschat template is called 'vicunna'" in line


def test_a_draft_step_beyond_a_heads_own_is_found_first(home, monkeypatch, capsys):
    options = ["--head", "HOME/medusa", "--out", "HOME/out", "--step"]
    (line,) = refused(home, monkeypatch, capsys, "acceptance", *options, "5")
    assert "--step is 5, the head" in line
    assert "drafts 4 tokens ahead" in line
    for head, step in (("medusa", "4"), ("eagle", "9")):
        *_, line = refused(home, monkeypatch, capsys, "acceptance", *options, step, "--head", f"HOME/{head}")
        assert "cannot load the target" in line


@pytest.mark.parametrize("command", [*PLACES, *FITS])
def test_a_precision_that_there_is_not_is_named_with_those_that_there_are(home, monkeypatch, capsys, command):
    options = ["--head", "HOME/eagle", "--dtype", "float8", *(PLACES | FITS)[command]]
    (line,) = refused(home, monkeypatch, capsys, command, *options)
    assert all(name in line for name in ("--dtype is 'float8'", *DTYPES))


def test_a_tree_or_verifier_without_a_drafter_is_refused():
    for options, words in [
        ({"tree": "2x4"}, "^--tree 2x4: nothing drafts; give --head or --drafter too$"),
        ({"verifier": "rrs", "tree": "2x4"}, "^--tree 2x4 and --verifier rrs: nothing drafts"),
    ]:
        with pytest.raises(InputError, match=words):
            begin(ModelOptions(target="nowhere", **options))


def test_a_heads_folder_may_have_an_at_sign_and_a_finished_evaluation_loads_nothing(tmp_path, monkeypatch, capsys):
    model = save_model(tmp_path / "target")
    save_head(new_head(Target.load(str(model))), tmp_path / "head@2x4")
    options = ["--max-new-tokens", "3", "--limit", "1", "--turns", "1", "--warm-up", "0", "--resamples", "10"]
    models = ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head@2x4")]
    monkeypatch.setattr(sys, "argv", ["treespec", "eval", *models, *options, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["configurations"]
    (row,) = [row for row in rows if row["drafter"]]
    assert row["drafter"] == f"head:{tmp_path}/head@2x4"
    assert row["tree"] is None

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):  # finished: nothing is loaded, and nothing says so
        main()
    assert f"reading {tmp_path}/out" in terminal.getvalue()
    assert "loading" not in terminal.getvalue()
