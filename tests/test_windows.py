"""Layers with a window keep the latest columns alone: no token changes, whatever is dropped."""

import pytest
import torch
from models import prompt, random_head, target

from treespec.api.spec import Spec
from treespec.model.cache import TreeCache


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window-6"])
def test_dropped_columns_change_no_token_of_unequal_texts_and_of_resumed_ones(name, monkeypatch):
    """Against all columns, over up to 15 windows. Where 6 tokens may be taken back, a text is, or starts again."""
    model = target(name)
    texts = [prompt(n, n) for n in (3, 21, 70)]
    said = []
    for slack in (9, 1000):
        monkeypatch.setattr(model.tree_decoder, "slack", slack)
        spec = Spec(model, random_head(model), "2x2")
        outputs = spec.generate(texts, max_new_tokens=24, batch=3)
        text = texts[2] + outputs[2].token_ids
        for asked in (texts[2], [*text[:90], 9, 4], [*text[:60], 9, 4]):
            outputs.append(spec.generate(asked, max_new_tokens=24))
        assert [output.stats.cached_tokens for output in outputs[4:]] == [89, 59 if slack > 9 else 0]
        said.append([output.token_ids for output in outputs])
    assert said[0] == said[1]


def test_a_window_of_two_keeps_two_columns_in_storage_for_eight():
    """The drawing of the cache."""
    cache = TreeCache(1, 8, None, [2], slack=2)
    letters = torch.arange(5.0)[:, None].expand(2, 1, 5, 1)
    cache.rewind([0, 0])
    cache.update(letters, letters, 0)
    cache.commit([range(5), range(2)])
    assert cache.tree_layers[0].storage[0][:, 0, :2, 0].tolist() == [[3, 4], [0, 1]]
    for lengths, left in (([4, 1], [4, 1]), ([3, 1], [0, 1])):
        cache.rewind(lengths)
        assert cache.lengths == left
    for _ in range(50):
        cache.update(letters[:, :, :1], letters[:, :, :1], 0)
        cache.commit([[0], [0]])
    assert cache.tree_layers[0].capacity == 8
