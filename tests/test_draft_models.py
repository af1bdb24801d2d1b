"""Language models that draft."""

import pytest
import torch
from equality import close
from growing import TEXTS, contents, joined, level_logits, same
from models import (
    CONFIGS,
    as_undrafted,
    prompt,
    random_model,
    save_model,
    small,
    target,
    tokenizer,
)
from tiny_configs import MODELS, tiny

from treespec.api.spec import Spec
from treespec.draft.auto.measure import measure
from treespec.draft.models.model import ModelProposer
from treespec.draft.models.other_vocabulary import tokens_differ
from treespec.model.target import Target

TOLERANCE = 2e-4  # float32, logits of order 1 to 10
LONG = [*TEXTS[:2], [(7 * i) % 60 + 3 for i in range(31)]]


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gpt2", "qwen3_next"])
def test_logits_at_every_node_are_those_of_plain_models_along_the_path(name):
    whole = target("llama")
    config = CONFIGS[name]() if name in CONFIGS else tiny(MODELS[name])
    proposer = ModelProposer(Target(random_model(config, seed=5)), whole)
    cache, together = joined(whole, proposer, LONG)
    for _ in range(2):  # a second time from the same roots, as after an interrupt
        for text, path, logits in level_logits(together, cache, LONG):
            wanted = proposer.model.model(torch.tensor([[*text, *path]])).logits[0, -1]
            close(logits, wanted, TOLERANCE, TOLERANCE)


def test_drafting_leaves_the_cache_of_the_target_as_it_was():
    whole = target("llama")
    cache, together = joined(whole, ModelProposer(small(), whole), LONG)
    before = contents(cache)
    level_logits(together, cache, LONG)
    assert same(before, contents(cache))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_the_target_is_accepted_whole(temperature):
    spec = Spec(target("llama"), ModelProposer(target("llama"), target("llama")), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8
    assert stats.acceptance_length == 5


def test_drafts_by_language_models_can_be_timed_for_trees_chosen_by_their_cost():
    model = target("llama")
    cost = measure(model, ModelProposer(small(), model))
    assert cost.level + cost.begin > 0
    spec = Spec(model, ModelProposer(small(), model), "auto:nodes=12,depth=4", times=cost)
    as_undrafted(spec, [prompt()], 16)


def test_it_runs_over_every_committed_token_once(monkeypatch):
    proposer = ModelProposer(small(), target("llama"))
    seen = []
    original = Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda self, *a, **k: seen.append((self, a[1])) or original(self, *a, **k))
    out = Spec(target("llama"), proposer, "chain:3").generate(prompt(length=50), max_new_tokens=20)
    run = torch.cat([tokens[0] for model, tokens in seen if model is proposer.model]).tolist()
    text = prompt(length=50) + out.token_ids
    assert len(run) > len(text) - 5
    assert run == text[: len(run)]


@pytest.mark.parametrize("vocab_size, missing", [(56, 8), (80, 0)])
def test_padding_of_either_embedding_is_no_difference(vocab_size, missing):
    """For a target of 64 tokens: what is missing is never drafted."""
    one = ModelProposer(small(vocab_size=vocab_size), target("llama"))
    spec = Spec(target("llama"), one, "2x3")
    as_undrafted(spec, [[60, 5]], 16)
    _, together = joined(target("llama"), one)
    (logits, *_) = together.begin(torch.tensor([8, 5, 41]))
    assert (logits.shape, int(logits.isinf().sum())) == ((1, 64), missing)


def test_another_tokenizer_is_noticed_by_the_first_token_that_differs(tmp_path):
    words = save_model(tmp_path / "target")
    others = save_model(tmp_path / "others")
    table = tokenizer().get_vocab()
    a, b = (next(token for token, i in table.items() if i == number) for number in (40, 42))
    text = tokenizer().backend_tokenizer.to_str()
    (others / "tokenizer.json").write_text(text.replace(f'"{a}":40', f'"{a}":42').replace(f'"{b}":42', f'"{b}":40'))
    target = Target.load(str(words))
    model = Target.load(str(others))
    assert tokens_differ(target.tokenizer, model.tokenizer, 400, 400) == f"token 40 is '{b}', the target's '{a}'"


def test_without_tokenizers_the_vocabularies_must_be_of_one_size():
    assert tokens_differ(None, None, 64, 64) is None
    assert "56 and 64" in tokens_differ(None, None, 64, 56)
