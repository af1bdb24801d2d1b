"""Stored features let the target go: its two ends train the same head."""

from dataclasses import replace

import pytest
import torch
from equality import close, seeded
from models import CONFIGS, random_model
from training import beside, same_head, trained, weights

from treespec.model.target import Target
from treespec.model.weights import load_ends
from treespec.train.run import train


@pytest.fixture
def config(config, tmp_path):
    return replace(config, features=f"{tmp_path}/features")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ends_of_a_target_are_those_of_the_whole(name, tmp_path):
    random_model(CONFIGS[name]()).save_pretrained(tmp_path)
    whole, part = Target.load(str(tmp_path)), Target(load_ends(str(tmp_path)), ends=True)
    tokens = torch.arange(3, 20)
    hidden = torch.randn(4, whole.feature_width, generator=seeded(0))
    assert torch.equal(part.embeddings(tokens), whole.embeddings(tokens))
    assert torch.equal(part.output_logits(hidden), whole.output_logits(hidden))
    assert (part.layers, part.dtype, part.context_length) == (whole.layers, whole.dtype, whole.context_length)
    assert (part.embed_scale, part.config.to_dict()) == (whole.embed_scale, whole.config.to_dict())
    own = sum(weight.numel() for weight in part.model.parameters())
    assert own < sum(weight.numel() for weight in whole.model.parameters()) / 2
    with pytest.raises(AttributeError):
        part.features(tokens[None])


def test_a_run_on_complete_features_loads_the_whole_target_at_its_end_alone(config, capsys):
    live = trained(beside(config, "live"), features=None)
    trained(config)
    said = capsys.readouterr().out
    assert "loading the whole target to store its features" in said
    assert "GiB, 128 bytes per token" in said  # 32 values in float32
    again = beside(config, "again")
    assert train(again).positions > 0
    said = capsys.readouterr().out
    assert said.count("loading the whole target") == 1
    assert "loading the whole target to validate and calibrate the head" in said
    assert same_head(again, config)
    for name, value in weights(live).items():
        close(value, weights(config)[name], 1e-5)
