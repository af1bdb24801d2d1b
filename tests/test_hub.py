"""Without a network the hub's cache serves: a name, a revision, a GGUF file alone; other names fail fast."""

import json
import os
import shutil
import subprocess

import pytest
import transformers as hf
from commands import cache_folder, to_command
from head_files import write_gguf
from models import random_model
from training import save_model


def print_loads() -> None:
    """In a process of its own, without a network: one for all, as its imports take seconds."""
    import json
    import time

    from treespec.errors import InputError
    from treespec.heads.checkpoint import load_head
    from treespec.model.identity import identify_target
    from treespec.model.placement import Placement
    from treespec.model.target import Target
    from treespec.model.weights import load_model

    said = {"absent": [], "revisions": []}
    for load in (Target.load, load_head):
        started = time.perf_counter()
        try:
            load("org/absent")
        except ValueError as error:
            said["absent"].append([str(error), time.perf_counter() - started < 5])
    for revision in (None, "other", "absent"):
        try:
            said["revisions"].append(identify_target("org/small", Placement(revision=revision)))
            target = Target.load("org/small", how=Placement(revision=revision))
            said["revisions"].append(float(target.model.lm_head.weight[0, 0]))
        except InputError as error:
            said["revisions"].append(str(error))
    said["layers"] = target.layers
    variant = Placement("gguf:tiny.gguf")
    config = load_model("org/small-GGUF", how=variant).config
    said["identity"] = identify_target("org/small-GGUF", variant)
    said["config"] = [config.model_type, config.num_hidden_layers, config.num_key_value_heads]
    print(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What loads by name say, with a cache of two states of a repository, and of a GGUF file alone."""
    hub = tmp_path_factory.mktemp("hub")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    place = save_model(cache_folder(hub, "org/small", "0123abc"), **sizes)
    other = shutil.copytree(place, cache_folder(hub, "org/small", "4567def", "other"))
    random_model(hf.AutoConfig.from_pretrained(place), seed=1).save_pretrained(other)
    alone = cache_folder(hub, "org/small-GGUF", "0123abc")
    alone.mkdir()
    write_gguf(hf.AutoModelForCausalLM.from_pretrained(place), alone / "tiny.gguf")
    nowhere = {"HF_HUB_CACHE": str(hub), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(to_command(print_loads), env=os.environ | nowhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    return json.loads(done.stdout)


def test_without_a_network_the_cache_serves_and_other_names_fail_fast(said):
    assert said["layers"] == 3
    assert len(said["absent"]) == 2
    for line, fast in said["absent"]:
        assert "not in the cache, and the hub cannot be reached" in line
        assert fast


def test_a_revision_is_another_state_of_a_repository(said):
    """Weights and identity are those of the named state."""
    first, of_first, second, of_second, absent = said["revisions"]
    assert (first, second) == ("commit 0123abc", "commit 4567def")
    assert of_first != of_second
    assert "revision absent of it is not in the cache" in absent


def test_a_repository_without_a_config_loads_from_the_cache(said):
    """Its config comes from the file."""
    assert said["identity"].startswith("as gguf ")
    assert said["config"] == ["llama", 3, 1]
