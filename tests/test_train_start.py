"""What a run starts from and what it trains: a head's weights, fitted ones, draft tokens, frozen outputs, dropout."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import random_head, target
from torch import nn
from training import (
    beside,
    options,
    refused,
    same_head,
    trained,
    write_data,
)

from treespec.draft.vocabulary import load_vocabulary
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.target import Target
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.train.config import DRAFT_VOCAB
from treespec.train.data.prepare import prepare
from treespec.train.machine import make_accelerator
from treespec.train.start import RIDGE, begin, fit_feature, sides, untrained, vocabulary_size


def test_a_run_that_goes_on_from_a_head_drafts_its_tokens_unless_others_are_asked_for(config):
    first = trained(config, draft_vocab=40, max_steps=1)
    tokens = load_vocabulary(first.out, 290).tolist()
    assert len(tokens) == 40
    for number, count in ((None, 40), (30, 30)):
        further = trained(beside(first, f"{number}"), from_head=first.out, draft_vocab=number)
        found = load_vocabulary(further.out, 290).tolist()
        assert len(found) == count
        assert number or found == tokens
    further = trained(beside(first, "all"), from_head=first.out, draft_vocab=0)
    assert load_vocabulary(further.out, 290) is None


def test_a_head_of_another_width_is_named(config, tmp_path):
    save_head(random_head(target("llama")), tmp_path / "other")
    complaint = r"--from-head .*other is another head: its vocab_size is 64, not 290"
    assert re.search(complaint, refused(config, from_head=f"{tmp_path}/other"))


def test_dropout_is_where_the_published_hydra_plus_has_it_and_ends_with_the_run(config):
    config = replace(config, head="hydra++", draft_heads=2, max_steps=2)
    model = Target.load(config.target, dtype="float32")
    head = untrained(config, model)
    names = set(head.state_dict())
    begin(config, model, head, None, None)
    drops = [name for name, part in head.named_modules() if isinstance(part, nn.Dropout)]
    assert len(drops) == head.max_depth * (head.blocks + 1)
    assert {"hydra_mlp.0.0", "hydra_lm_head.1.0"} <= set(drops)
    assert set(head.state_dict()) == names
    assert not [part for part in load_head(trained(config).out).modules() if isinstance(part, nn.Dropout)]


def test_it_is_the_32000_most_frequent_where_the_target_has_more():
    def size(vocab_size=DRAFT_VOCAB + 8, head="eagle3", **changes):
        return vocabulary_size(options(head=head, **changes), SimpleNamespace(vocab_size=vocab_size))

    assert size() == DRAFT_VOCAB == 32000
    assert size(draft_vocab=7) == 7
    assert size(draft_vocab=0) == size(head="eagle") == size(64) == 0


@pytest.mark.parametrize("kind, vocabulary", [("eagle", None), ("eagle3", 40)])
def test_a_run_goes_on_from_the_weights_of_another_head(config, tmp_path, kind, vocabulary):
    """With learning rate 0 they stay what they were, in more data too, and so do an EAGLE-3 head's draft tokens."""
    config = trained(config, max_steps=1, head=kind, draft_vocab=vocabulary)
    more, on = write_data(tmp_path / "more.jsonl", count=40, name="other"), {"from_head": config.out}
    still = trained(beside(config, "still"), draft_vocab=None, learning_rate=0.0, data=str(more), **on)
    assert same_head(config, still)
    assert f"its kind is {kind}, not hydra" in refused(beside(still, "other"), head="hydra")


@pytest.mark.parametrize("bias", [True, False])
def test_fitted_first_weights_are_the_least_squares_map_to_the_next_feature(config, bias):
    """Against torch's own solver in float64, with the same ridge, to 1e-3 of the weights' norm."""
    model, options = Target.load(config.target, dtype="float32"), replace(config, bias=bias)
    head = untrained(options, model)
    examples, _ = encode_conversations(model.tokenizer, read_conversations(config.data)[0], None, 2048)
    data = prepare(options, model, (), examples, make_accelerator(options))
    fit_feature(head, data, seed=0)

    both = [sides(head, data, number) for number in range(len(data.train))]
    x, y = (torch.cat(parts).double() for parts in zip(*both, strict=True))
    ridge = torch.eye(x.shape[1], dtype=x.dtype) * (RIDGE * x.square().sum(0).mean()).sqrt()
    wanted = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, y.new_zeros(len(ridge), y.shape[1])])).solution
    given = [head.fc.weight.T, *([head.fc.bias[None]] if bias else [])]
    assert (torch.cat(given).detach() - wanted).norm() < 1e-3 * wanted.norm()
