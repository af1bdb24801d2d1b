"""What does not go together is refused by names and small files, before any weights are read."""

import pytest
import torch
from commands import treespec
from models import hollow_model, random_eagle3, random_head, target
from safetensors.torch import load_file, save_file

from treespec.draft.drafters import DrafterSpec
from treespec.draft.pairing import model_of
from treespec.draft.trained.kinds import new_head
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.registry import levels_in


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Heads, and a target that has a configuration but no weights: loading it is another error."""
    folder = tmp_path_factory.mktemp("pairing")
    hollow_model(folder / "target")
    loaded = target("llama")
    heads = {kind: new_head(kind, loaded, heads=heads) for kind, heads in (("medusa", 4), ("hydra", 3))}
    heads |= {"eagle": random_head(loaded), "eagle3": random_eagle3(loaded)}
    for name, head in heads.items():
        save_head(head, folder / name)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        "--head HOME/medusa --tree chain:4",
        "--head HOME/medusa --verifier rrs-wo",
        "--head HOME/eagle3 --tree chain:9",
        "--drafter sparse:64,window=32 --tree dynamic",
        "--drafter lookup:tokens=5 --verifier topk",
        "--drafter model:a",
    ],
)
def test_what_goes_together_is_loaded(pairs, capsys, options):
    """The target's missing weights are the error."""
    line = f"generate --target HOME/target --prompt x {options}".replace("HOME", str(pairs))
    assert treespec(line) == 2
    assert "treespec: cannot load the target" in capsys.readouterr().err


def test_levels_by_names_are_those_of_the_loaded_head(pairs, tmp_path):
    """Published configurations of Medusa say fewer heads than their files hold."""
    for name in ("eagle", "eagle3", "medusa", "hydra"):
        assert levels_in(pairs / name) == load_head(pairs / name).max_depth
    for config in ('{"medusa_num_heads": 2}', "{}", '{"medusa_num_heads": 2, "checksum_": 1}'):
        tensors = load_file(pairs / "medusa" / "model.safetensors")
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(config)
        assert levels_in(tmp_path) == load_head(tmp_path).max_depth == 4


def test_what_only_reading_tells_is_left_to_the_loading(pairs, tmp_path):
    torch.save(load_file(pairs / "medusa" / "model.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    assert levels_in(tmp_path) is None
    assert model_of(DrafterSpec.parse("head:someone/on-the-hub")).calibrated
