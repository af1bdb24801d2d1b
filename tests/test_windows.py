"""Layers with a window keep the latest columns alone: no token changes, whatever is dropped."""

import pytest
import torch
from models import plain_generate, prompt, random_head, target

from treespec.api.spec import Spec
from treespec.model.cache import TreeCache


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window-6"])
def test_dropped_columns_change_no_token_of_unequal_texts_and_of_resumed_ones(name, monkeypatch):
    """Transformers' own generate keeps all columns. Texts of up to 18 windows; 6 tokens may be taken back."""
    model = target(name)
    monkeypatch.setattr(model, "slack", 9)
    spec, texts = Spec(model, random_head(model), "2x2"), [prompt(n, n) for n in (3, 21, 70)]
    outputs = spec.generate(texts, max_new_tokens=40, batch=3)
    assert [output.token_ids for output in outputs] == [plain_generate(model, text, 40) for text in texts]
    text = texts[2] + spec.generate(texts[2], max_new_tokens=40).token_ids
    for kept, cached in ((106, 105), (60, 0)):
        text = [*text[:kept], 9, 4]
        output = spec.generate(text, max_new_tokens=9)
        assert (output.token_ids, output.stats.cached_tokens) == (plain_generate(model, text, 9), cached)
    most = [layer.capacity for layer in spec.decoder.rows.kept[0].cache.tree_layers]
    assert most == []


def test_five_tokens_under_a_window_of_two_leave_two_columns():
    """The drawing of the cache."""
    cache, letters = TreeCache(1, 8, None, [2], slack=2), torch.arange(5.0)[:, None].expand(2, 1, 5, 1)
    cache.rewind([0, 0])
    cache.update(letters, letters, 0)
    cache.commit([range(5), range(2)])
    assert cache.tree_layers[0].storage[0][:, 0, :2, 0].tolist() == [[3, 4], [0, 1]]
    for lengths, left in (([4, 1], [4, 1]), ([3, 1], [0, 1])):
        cache.rewind(lengths)
        assert cache.lengths == left
