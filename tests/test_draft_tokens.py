"""Which tokens an EAGLE-3 head is trained to draft where nothing is said."""

from dataclasses import replace

import pytest
import torch
from models import GROUPED, random_eagle3, random_model, save_model, target
from training import same_weights, small_run, weights, write_data
from transformers import LlamaConfig

from treespec.heads.checkpoint import load_head
from treespec.model.target import Target
from treespec.train.config import DRAFT_VOCAB, TrainConfig
from treespec.train.data.prepare import vocabulary_size
from treespec.train.run import train


@pytest.fixture(scope="module")
def large():
    return Target(random_model(LlamaConfig(**GROUPED | {"vocab_size": DRAFT_VOCAB + 8})))


def size(model, drafter, out, **options):
    config = TrainConfig(target="target", data="data", out=str(out), **{"head": "eagle3"} | options)
    return vocabulary_size(config, model, drafter)


def test_it_is_the_32000_most_frequent_where_the_target_has_more(large, tmp_path):
    head = random_eagle3(large)
    assert size(large, head, tmp_path) == DRAFT_VOCAB == 32000
    assert size(large, head, tmp_path, draft_vocab=0) is None
    assert size(large, head, tmp_path, draft_vocab=7) == 7
    assert size(large, head, tmp_path, head="eagle") is None
    assert size(target("llama"), random_eagle3(target("llama")), tmp_path) is None


def test_a_target_whose_output_cannot_be_cut_keeps_all_tokens(large, tmp_path, monkeypatch):
    monkeypatch.setattr(large.model, "get_output_embeddings", lambda: torch.nn.Identity())
    assert size(large, random_eagle3(target("llama")), tmp_path) is None


def test_a_run_goes_on_from_a_head_with_a_draft_vocabulary(tmp_path):
    data, model = write_data(tmp_path / "data.jsonl"), save_model(tmp_path / "model")
    first = small_run(model, data, tmp_path / "first", head="eagle3", draft_vocab=40, max_steps=1)
    train(first)
    second = replace(first, out=str(tmp_path / "second"), draft_vocab=None, from_head=first.out, learning_rate=0.0)
    train(second)
    assert same_weights(weights(first), weights(second))
    assert len(load_head(second.out).vocabulary) == 40
