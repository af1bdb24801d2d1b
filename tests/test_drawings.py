"""The small trees that docstrings draw are what the code gives; all are cut from 0 ─ (1 ─ 3, 2 ─ 4)."""

import torch

from treespec.model.cache import TreeCache
from treespec.model.recurrent_rows import path_rows
from treespec.trees.layout import layout
from treespec.trees.mask import ancestor_mask, attention_mask, chunk_mask, positions, window_mask
from treespec.trees.static import StaticTree
from treespec.trees.tree import Rows, TokenTree, connect

FIVE = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])
SEEN = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_a_node_sees_what_is_above_it():
    assert ancestor_mask(FIVE, max_depth=2).int().tolist() == SEEN


def test_texts_of_a_batch_have_their_own_positions_and_columns():
    mask = attention_mask(ancestor_mask(FIVE, 2).expand(2, 5, 5), DEPTH.expand(2, 5), lengths=[3, 1])
    assert mask[:, 4].int().tolist() == [[1, 1, 1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1, 0, 1]]
    places = positions(DEPTH.expand(2, 5), lengths=[3, 1])
    assert places.tolist() == [[0, 1, 2, 3, 4, 4, 5, 5], [0, 1, 2, 1, 2, 2, 3, 3]]
    for near in (window_mask(places, 5, window=2), chunk_mask(places, 5, chunk=4)):
        assert (mask & near)[0, 4].nonzero().flatten().tolist() == [5, 7]  # its parent and itself


def test_candidates_are_renumbered():
    parents = torch.tensor([0, 0, 0, 0, 1, 1, 3])
    assert connect(torch.tensor([0, 1, 3, 5, 6]), parents).tolist() == FIVE.tolist()


def test_a_tree_with_extra_rows_is_one_forward():
    links, depth = torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1])
    mask = torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]).bool()
    rows = Rows(torch.tensor([13, 14]), torch.tensor([1, 2]), mask, asked=1)
    tree = TokenTree(torch.tensor([10, 11, 12]), links, depth, ancestor_mask(links, 1), rows=rows)
    tokens, depths, seen = tree.forwarded()
    assert (tokens.tolist(), depths.tolist()) == ([10, 11, 12, 13, 14], [0, 1, 1, 1, 2])
    assert seen.int().tolist() == [*SEEN[:3], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]


def test_a_static_tree_is_laid_out_level_by_level():
    shape = layout(StaticTree(((0,), (2,), (0, 0), (2, 1))), torch.device("cpu"))
    assert shape.parents.tolist() == FIVE.tolist()
    fields = ("nodes", "draws", "rows", "columns", "parent_rows")
    drawn = [[[0], [3], [0, 0], [0, 2], [0]], [[1, 2], [1, 2], [0, 1], [0, 1], [0, 0]]]
    assert [[getattr(level, name).tolist() for name in fields] for level in shape.levels] == drawn
    assert [level.first for level in shape.levels] == [1, 3]


def test_accepted_nodes_move_to_the_end_of_their_text():
    cache = TreeCache(layers=1, capacity=16)
    cache.join([TreeCache(layers=1, capacity=16)])
    written = torch.tensor([[1, 2, 3, 4, 10, 11, 12, 13, 14], [5, 6, 0, 0, 20, 21, 22, 23, 24]])
    states = written[:, None, :, None].float()
    cache.tree_layers[0].update(states, states)
    cache.rewind([4, 2])
    cache.commit([[0, 2], [0, 1, 4]])
    keys = cache.tree_layers[0].storage[0][:, 0, :, 0].int()
    assert cache.lengths == [6, 5]
    assert keys[0, :6].tolist() == [1, 2, 3, 4, 10, 12]
    assert keys[1, :5].tolist() == [5, 6, 20, 21, 24]


def test_a_tree_goes_through_a_recurrent_layer_as_its_paths():
    rows = path_rows(ancestor_mask(FIVE, 2)[None], 3 + DEPTH[None])
    assert (rows.texts.tolist(), rows.whole) == ([0, 0], False)
    assert rows.columns.tolist() == [[0, 1, 3], [0, 2, 4]]
    assert rows.outputs.tolist() == [[0, 1, 4, 2, 5]]
    assert rows.spread(torch.tensor([[10, 11, 12, 13, 14]])).tolist() == [[10, 11, 13], [10, 12, 14]]
    assert rows.gathered(torch.tensor([[0, 1, 2], [3, 4, 5]])).tolist() == [[0, 1, 4, 2, 5]]
