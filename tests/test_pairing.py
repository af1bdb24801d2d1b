"""What does not go together is refused by names and small files, before any weights are read."""

import subprocess
import sys

import pytest
import torch
from models import hollow_model, random_eagle3, random_head, target
from safetensors.torch import load_file, save_file

from treespec.cli import main
from treespec.draft.drafters import DrafterSpec
from treespec.draft.pairing import model_of
from treespec.draft.trained.kinds import new_hydra, new_medusa
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.known import levels_in


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Heads, and a target that has a configuration but no weights: loading it is another error."""
    folder = tmp_path_factory.mktemp("pairing")
    hollow_model(folder / "target")
    loaded = target("llama")
    save_head(random_head(loaded), folder / "eagle")
    save_head(random_eagle3(loaded), folder / "eagle3")
    save_head(new_medusa(loaded, 4), folder / "medusa")
    save_head(new_hydra(loaded, 3), folder / "hydra")
    return folder


def refused(home, monkeypatch, capsys, command, *options):
    """The only line that a command says."""
    given = [option.replace("HOME", str(home)) for option in options]
    monkeypatch.setattr(sys, "argv", ["treespec", command, "--target", str(home / "target"), *given])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err.replace("\r\x1b[K", "").splitlines()
    return [line for line in said if not line.startswith("loading")]


def test_what_goes_together_is_loaded(home, monkeypatch, capsys):
    """The target's missing weights are the error."""
    for options in (
        ["--head", "HOME/medusa", "--tree", "chain:4"],
        ["--head", "HOME/medusa", "--verifier", "rrs-wo"],
        ["--head", "HOME/eagle3", "--tree", "chain:9"],
        ["--drafter", "sparse:64,snapkv", "--tree", "dynamic"],
        ["--drafter", "lookup:tokens=5", "--verifier", "topk"],
        ["--drafter", "model:a+b"],
    ):
        (line,) = refused(home, monkeypatch, capsys, "generate", *options, "--prompt", "x")
        assert "cannot load the target" in line


def test_levels_by_names_are_those_of_the_loaded_head(home, tmp_path):
    """Published configurations of Medusa say fewer heads than their files hold."""
    for name in ("eagle", "eagle3", "medusa", "hydra"):
        assert levels_in(home / name) == load_head(home / name).max_depth
    for config in ('{"medusa_num_heads": 2}', "{}", '{"medusa_num_heads": 2, "checksum_": 1}'):
        tensors = load_file(home / "medusa" / "model.safetensors")
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(config)
        assert levels_in(tmp_path) == load_head(tmp_path).max_depth == 4


def test_what_only_reading_tells_is_left_to_the_loading(home, tmp_path):
    torch.save(load_file(home / "medusa" / "model.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    assert levels_in(tmp_path) is None
    assert model_of(DrafterSpec.parse("head:someone/on-the-hub")).calibrated


def test_a_wrong_pair_is_refused_before_transformers_is_imported(home):
    code = (
        "import sys; from treespec.cli.early import check_pairing\n"
        "try: check_pairing(sys.argv[1], 'dynamic', 'rrs-wo', False)\n"
        "except ValueError: print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, f"head:{home}/eagle"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
