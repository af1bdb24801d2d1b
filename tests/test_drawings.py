"""The small examples that docstrings draw are what the code gives."""

import torch

from treespec.draft.grow.fixed import in_turns, table
from treespec.draft.grow.growth import Nodes
from treespec.model.cache import TreeCache
from treespec.model.masks import additive_masks
from treespec.model.recurrent_rows import path_rows
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.is_lp import lump
from treespec.verify.layer import places_of_draws
from treespec.verify.optimal import Optimal
from treespec.verify.walk import children_of

ROOT, A, B, C, D, E = 10, 11, 12, 13, 14, 15


def five_nodes(*tokens: int) -> TokenTree:
    """The tree 0 ─ (1 ─ 3, 2 ─ 4)."""
    parents = torch.tensor([-1, 0, 0, 1, 2])
    return TokenTree(torch.tensor(tokens), parents, torch.tensor([0, 1, 1, 2, 2]), ancestor_mask(parents, 2))


def test_children_stand_in_the_row_of_their_parent() -> None:
    rows = [[-1] * 5 for _ in range(5)]
    rows[0][1:3], rows[1][3], rows[2][4] = [A, B], C, D
    assert children_of(five_nodes(ROOT, A, B, C, D)).tolist() == rows


def test_a_draw_has_its_nodes_place_or_one_of_its_own() -> None:
    draws = Draws(torch.tensor([[A, B], [C, D], [E, E]]))
    drafts = Drafts(torch.tensor([0, 1, 2]), torch.ones(3, 16), draws)
    assert places_of_draws(five_nodes(ROOT, A, B, C, E), drafts).tolist() == [[1, 2], [3, 8], [4, 4]]


def test_levels_are_numbered_as_they_are_added() -> None:
    nodes = Nodes(torch.tensor([ROOT]))
    nodes.add(torch.tensor([A, B]), torch.tensor([0, 0]))
    nodes.add(torch.tensor([C, D]), torch.tensor([1, 2]))
    tree, drawn = nodes.tree(), five_nodes(ROOT, A, B, C, D)
    for name in ("tokens", "parents", "depth", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(drawn, name))


def test_a_window_hides_the_drawn_columns() -> None:
    places = torch.tensor([[0, 1, 2, 3, 3]])
    seen = torch.tensor([[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]]).bool()
    windows = {"full_attention": None, "sliding_attention": 2}
    masks = additive_masks(windows, places, seen, torch.float32, torch.device("cpu"), repeated=2)
    assert isinstance(masks, dict)
    visible = {kind: (mask[0, 0] == 0).int().tolist() for kind, mask in masks.items()}
    assert visible["full_attention"] == 2 * seen[0].int().tolist()
    assert visible["sliding_attention"] == 2 * [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]


def test_accepted_nodes_move_to_the_end_of_their_text() -> None:
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


def test_models_take_turns_and_skip_what_is_taken() -> None:
    a, b, c, d, e = range(5)
    logits = torch.zeros(1, 2, 5)
    for model, order in enumerate([[d, b, a, c, e], [d, b, c, a, e]]):
        logits[0, model, order] = torch.arange(5.0, 0, -1)
    assert in_turns(logits, 4).tolist() == [[2, 3, 1, 4, 0]]


def test_narrow_levels_are_padded() -> None:
    levels = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5], [6, 7]])]
    assert table(levels, -1).tolist() == [[1, 2, 3], [4, 5, -1], [6, 7, -1]]


def test_tokens_outside_a_small_alphabet_are_one_token() -> None:
    p, q = torch.tensor([[0.1, 0.4, 0.1, 0.3, 0.1]]), torch.tensor([[0.2, 0.2, 0.3, 0.1, 0.2]])
    small_p, small_q, number = lump(p, q, torch.tensor([[1, 3]]))
    assert torch.allclose(small_p, torch.tensor([[0.4, 0.3, 0.0]]))
    assert torch.allclose(small_q, torch.tensor([[0.2, 0.1, 0.7]]))
    assert number.tolist() == [[2, 0, 2, 1, 2]]


def test_cells_are_ranks_or_64_an_octave_of_p_over_q() -> None:
    q = torch.full((1, 5), 0.2)
    p = q * torch.tensor([[2, 0.5, 1, 0.25, 4]])
    one_draw = torch.ones(1, 1, dtype=torch.int64)
    assert Optimal(exact=1).couple(p, q, one_draw)[0].tolist() == [[3, 1, 2, 0, 4]]
    assert Optimal().couple(p, q, one_draw)[0].tolist() == [[576, 448, 512, 384, 640]]


def test_the_drawn_tree_goes_through_a_recurrent_layer_as_its_paths() -> None:
    tree = five_nodes(ROOT, A, B, C, D)
    places = 3 + tree.depth[None]
    rows = path_rows(tree.ancestors[None], places)
    assert (rows.texts.tolist(), rows.whole) == ([0, 0], False)
    assert rows.columns.tolist() == [[0, 1, 3], [0, 2, 4]]
    assert rows.outputs.tolist() == [[0, 1, 4, 2, 5]]
    assert rows.spread(torch.tensor([[10, 11, 12, 13, 14]])).tolist() == [[10, 11, 13], [10, 12, 14]]
    steps = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert rows.gathered(steps).tolist() == [[0, 1, 4, 2, 5]]
