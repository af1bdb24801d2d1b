"""The target as its own drafter with sublayers left out."""

import copy
import json

import pytest
import torch
import transformers as hf
from growing import TEXTS, contents, joined, level_logits, same
from models import CONFIGS, TableConfig, TableModel, prompt, save_model, target

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.skip import SkipProposer, refuse_what_cannot_skip, skipping
from treespec.draft.models.skip_set import SkipSet, load_skip_set, save_skip_set
from treespec.errors import InputError
from treespec.model.target import Target

TOLERANCE = 2e-4  # float32, logits of order 1 to 10
SOME = SkipSet(3, attention=(1,), mlp=(0, 1))


def without(model, skipped):
    """A copy whose skipped sublayers add nothing, as what they end in is zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for k in skipped.attention:
            model.model.layers[k].self_attn.o_proj.weight.zero_()
        for k in skipped.mlp:
            model.model.layers[k].mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window-6"])
def test_logits_at_every_node_are_those_without_the_sublayers_over_the_whole_targets_text(name):
    whole = target(name)
    lame, cache_of = without(whole.model, SOME), {}
    for text in TEXTS:
        cache_of[tuple(text)] = hf.DynamicCache(config=whole.config)
        if len(text) > 1:
            whole.model(input_ids=torch.tensor([text[:-1]]), past_key_values=cache_of[tuple(text)])
    cache, together = joined(whole, SkipProposer(whole, SOME))
    for text, path, logits in level_logits(together, cache):
        known = copy.deepcopy(cache_of[tuple(text)])
        with torch.no_grad():
            alone = lame(input_ids=torch.tensor([[text[-1], *path]]), past_key_values=known).logits[0, -1]
        assert torch.allclose(logits, alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_drafting_leaves_the_target_and_its_cache_as_they_were():
    whole = target("llama")
    cache, together = joined(whole, SkipProposer(whole, SOME))
    before, modules = contents(cache), dict(whole.model.named_modules())
    level_logits(together, cache)
    assert same(before, contents(cache))
    assert dict(whole.model.named_modules()) == modules
    with pytest.raises(KeyboardInterrupt), skipping(whole, SOME):
        raise KeyboardInterrupt
    assert dict(whole.model.named_modules()) == modules


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_skip_set_is_accepted_whole(temperature):
    spec = Spec(target("llama"), SkipProposer(target("llama"), SkipSet(3)), "chain:4", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8


class TestSkipSet:
    def test_a_saved_set_is_loaded_and_drafts(self, tmp_path):
        words = save_model(tmp_path / "target")
        file = tmp_path / "skip.json"
        save_skip_set(SOME, file, {"target": str(words)})
        assert load_skip_set(file, 3) == SOME
        assert json.loads(file.read_text())["target"] == str(words)
        spec = load(str(words), None, "2x3", drafter=f"self:{file}", dtype="float32")
        wanted = spec.baseline().generate([5, 6], max_new_tokens=8).token_ids
        assert spec.generate([5, 6], max_new_tokens=8).token_ids == wanted

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (None, "cannot read"),
            ("{", "is damaged, it is not JSON"),
            ('{"layers": Infinity, "attention": [], "mlp": []}', "is no skip set"),
            ('{"layers": 3, "mlp": []}', "is no skip set"),
            ('{"layers": 3, "attention": [1.5], "mlp": []}', "is no skip set"),
            ('{"layers": 3, "attention": [3], "mlp": []}', "names layer 3, the target's are 0 to 2"),
            ('{"layers": 40, "attention": [3], "mlp": []}', "for 40 layers, the target has 3"),
        ],
    )
    def test_another_file_is_refused(self, tmp_path, content, complaint):
        if content:
            (tmp_path / "skip.json").write_text(content)
        with pytest.raises(InputError, match=complaint) as caught:
            load_skip_set(tmp_path / "skip.json", 3)
        assert "\n" not in str(caught.value)


def test_models_of_another_build_are_refused_by_name():
    for model in (target("gpt2"), target("opt"), target("gpt-oss"), Target(TableModel(TableConfig(4)))):
        with pytest.raises(InputError, match=f"{type(model.model).__name__} cannot draft with layers skipped"):
            refuse_what_cannot_skip(model)
    for name in CONFIGS.keys() & {"llama", "qwen3", "phi3", "gemma3", "granite", "cohere"}:
        refuse_what_cannot_skip(target(name))
