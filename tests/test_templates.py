"""Templates of training runs: each is options that `train` takes, names its source, and fits its target."""

import re
from dataclasses import replace

import pytest
from commands import complains, treespec
from training import checkpoint_of, train_until_killed

from treespec.cli.options import read_option_file
from treespec.heads.checkpoint import load_head
from treespec.train.config import TrainConfig
from treespec.train.templates import find_template, list_templates

NAMES = list_templates()
TYPES = {field.name: field.type for field in TrainConfig.__dataclass_fields__.values()}
FAMILIES = (
    "llama-3",
    "qwen2.5",
    "qwen3-",
    "qwen3.5",
    "gpt-oss",
    "gemma-3",
    "gemma-4",
    "mistral",
    "glm",
    "deepseek",
    "phi",
)


def read_config(name):
    """The options of a template as `train --config NAME` has them."""
    words = read_option_file(name, TYPES)
    values = {}
    for option, text in words.items():
        kind = str(TYPES[option])
        values[option] = int(text) if "int" in kind else float(text) if "float" in kind else text
    return TrainConfig(**values)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_options_that_train_takes(name):
    config = read_config(name)
    assert config.out == f"heads/{name}"
    assert config.hyperparameters.learning_rate <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_template_says_where_its_numbers_come_from(name):
    text = find_template(name).read_text()
    assert re.search(r"^# Source \(\d{4}-\d\d-\d\d\): \S+", text, re.MULTILINE)
    assert "# Hours: " in text


@pytest.mark.parametrize("name", NAMES)
def test_the_aux_layers_of_a_template_are_in_its_target(name):
    layers = re.search(r"^aux-layers: .* # of (\d+)$", find_template(name).read_text(), re.MULTILINE)
    ids = read_config(name).list_aux_layers()
    assert bool(layers) == bool(ids)
    assert not layers or 0 <= ids[0] < ids[-1] <= int(layers[1])


def test_twenty_templates_cover_the_families_that_people_ask_for():
    assert len(NAMES) >= 20
    assert [family for family in FAMILIES if not any(name.startswith(family) for name in NAMES)] == []


def test_a_file_of_that_name_wins_over_a_template_and_a_wrong_name_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-4-mini").write_text("target: mine\n")
    assert read_option_file("phi-4-mini", TYPES) == {"target": "mine"}
    assert treespec("train --config phi-5") == 2
    assert "cannot read --config phi-5" in capsys.readouterr().err


def test_aux_layers_are_the_heads_and_stand_once_in_order(config):
    train_until_killed(replace(config, head="eagle3", aux_layers="1,2"))
    assert load_head(checkpoint_of(config)).aux_layers == (1, 2)
    with complains("--aux-layers is 2,1: name each layer once, in ascending order"):
        replace(config, head="eagle3", aux_layers="2,1")
