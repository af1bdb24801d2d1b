"""A repository of a GGUF file alone loads and is known, without a network too; damage and misuse are told in a line."""

import os
import subprocess
import sys

import pytest
import torch
import transformers as hf
from gguf_files import write_gguf
from models import save_model

from treespec.errors import InputError
from treespec.model.target import Target
from treespec.model.variant import Variant
from treespec.train.machine import shard


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_model(tmp_path_factory.mktemp("places") / "target", **sizes)


def test_a_repository_without_a_config_loads_from_the_cache_and_has_an_identity(plain, tmp_path):
    """Its config comes from the file."""
    cached = tmp_path / "hub" / "models--org--small-GGUF"
    snapshot = cached / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc")
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(plain), snapshot / "tiny.gguf")
    code = """if True:
    from treespec.model.identity import target_identity
    from treespec.model.weights import load_model
    from treespec.model.variant import Variant
    variant = Variant("gguf:tiny.gguf")
    print(target_identity("org/small-GGUF", variant))
    print(load_model("org/small-GGUF", variant=variant).config.num_hidden_layers)
    """
    nowhere = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    identity, layers = done.stdout.splitlines()
    assert identity.startswith("as gguf ")
    assert layers == "3"


def test_a_damaged_file_that_stands_alone_is_told_in_a_line(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(InputError, match="cannot load the target") as caught:
        Target.load(str(tmp_path), variant=Variant("gguf:broken.gguf"))
    assert "\n" not in str(caught.value)


def test_blocks_are_not_split_over_processes(plain, tmp_path):
    file = write_gguf(hf.AutoModelForCausalLM.from_pretrained(plain), tmp_path / "tiny.gguf")
    target = Target.load(str(plain), variant=Variant(f"gguf:{file}"))
    with pytest.raises(InputError, match="this target's are quantised"):
        shard(target, 2, torch.device("cpu"))
