"""Language models that draft: a smaller one, several, the target without some layers or over a part of its cache."""

import copy

import pytest
import torch
import transformers as hf
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
from treespec.draft.cost.measure import measure
from treespec.draft.models.model import ModelProposer
from treespec.draft.models.other_vocabulary import tokens_differ
from treespec.draft.models.skip import SkipProposer, skipping
from treespec.draft.models.skip_set import SkipSet
from treespec.model.target import Target

TOLERANCE = 2e-4  # float32, logits of order 1 to 10
LONG = [*TEXTS[:2], [(7 * i) % 60 + 3 for i in range(31)]]
SOME = SkipSet(3, attention=(1,), mlp=(0, 1))
LOWEST = torch.finfo(torch.float32).min


PROPOSERS = {
    "model": lambda whole: ModelProposer(small(), whole),
    "skip": lambda whole: SkipProposer(whole, SOME),
}
WHOLE = {  # the target itself, each in its way
    "model": lambda whole: ModelProposer(whole, whole),
    "skip": lambda whole: SkipProposer(whole, SkipSet(3)),
}


def without(model, skipped):
    """A copy whose skipped sublayers add nothing, as what they end in is zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for k in skipped.attention:
            model.model.layers[k].self_attn.o_proj.weight.zero_()
        for k in skipped.mlp:
            model.model.layers[k].mlp.down_proj.weight.zero_()
    return model


def by_hand(kind, proposer, whole):
    """Draft logits after a text and a path by plain models: over the whole text, or over the target's keys of it."""
    lame = without(whole.model, SOME) if kind == "skip" else whole.model

    def of_the_model(text, path):
        return proposer.model.model(torch.tensor([[*text, *path]])).logits[0, -1]

    def over_the_cache(text, path):
        known = hf.DynamicCache(config=whole.config)
        if text[:-1]:
            whole.model(input_ids=torch.tensor([text[:-1]]), past_key_values=known)
        return lame(input_ids=torch.tensor([[text[-1], *path]]), past_key_values=known).logits[0, -1]

    return of_the_model if kind == "model" else over_the_cache


@pytest.mark.parametrize(
    "kind, name",
    [
        *(("model", name) for name in ("llama", "mistral-window-6", "gpt2", "qwen3_next")),
        *(("skip", name) for name in ("llama", "mistral-window-6", "gemma3")),
    ],
)
def test_logits_at_every_node_are_those_of_plain_models_along_the_path(kind, name):
    whole = target("llama" if kind == "model" else name)
    if kind == "model":
        config = CONFIGS[name]() if name in CONFIGS else tiny(MODELS[name])
        proposer = ModelProposer(Target(random_model(config, seed=5)), whole)
    else:
        proposer = PROPOSERS[kind](whole)
    wanted = by_hand(kind, proposer, whole)
    cache, together = joined(whole, proposer, LONG)
    for _ in range(2 if kind == "model" else 1):  # a second time from the same roots, as after an interrupt
        for text, path, logits in level_logits(together, cache, LONG):
            close(logits, wanted(text, path), TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("kind", PROPOSERS)
def test_drafting_leaves_the_target_and_its_cache_as_they_were(kind):
    whole = target("llama")
    cache, together = joined(whole, PROPOSERS[kind](whole), LONG)
    before, modules = contents(cache), dict(whole.model.named_modules())
    level_logits(together, cache, LONG)
    assert same(before, contents(cache))
    assert dict(whole.model.named_modules()) == modules
    with pytest.raises(KeyboardInterrupt), skipping(whole, SOME):
        raise KeyboardInterrupt
    assert dict(whole.model.named_modules()) == modules


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_that_is_the_target_is_accepted_whole(kind, temperature):
    spec = Spec(target("llama"), WHOLE[kind](target("llama")), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8
    assert stats.acceptance_length == 5


@pytest.mark.parametrize("kind", WHOLE)
def test_drafts_by_language_models_can_be_timed_for_trees_chosen_by_their_cost(kind):
    model = target("llama")
    cost = measure(model, PROPOSERS[kind](model))
    assert cost.level + cost.begin > 0
    spec = Spec(model, PROPOSERS[kind](model), "auto:nodes=12,depth=4", times=cost)
    as_undrafted(spec, [prompt()], 16)


def test_it_runs_over_every_committed_token_once(monkeypatch):
    proposer, seen, original = PROPOSERS["model"](target("llama")), [], Target.prefill
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
    words, others = save_model(tmp_path / "target"), save_model(tmp_path / "others")
    table = tokenizer().get_vocab()
    a, b = (next(token for token, i in table.items() if i == number) for number in (40, 42))
    text = tokenizer().backend_tokenizer.to_str()
    (others / "tokenizer.json").write_text(text.replace(f'"{a}":40', f'"{a}":42').replace(f'"{b}":42', f'"{b}":40'))
    target, model = Target.load(str(words)), Target.load(str(others))
    assert tokens_differ(target.tokenizer, model.tokenizer, 400, 400) == f"token 40 is '{b}', the target's '{a}'"


def test_without_tokenizers_the_vocabularies_must_be_of_one_size():
    assert tokens_differ(None, None, 64, 64) is None
    assert "56 and 64" in tokens_differ(None, None, 64, 56)
