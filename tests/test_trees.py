"""Trees: shapes, masks, EAGLE-2's choice of nodes, and the small trees that docstrings draw."""

import json

import pytest
import torch

from treespec.trees.dynamic import AutoTree, ConfidentChain, DDTree, DynamicTree
from treespec.trees.layout import layout
from treespec.trees.mask import ancestor_mask, attention_mask, chunk_mask, positions, window_mask
from treespec.trees.policy import POLICIES, policy
from treespec.trees.sampled import SampledTree
from treespec.trees.static import StaticTree, TreeError, balanced, chain, eagle, text_of
from treespec.trees.tree import best_first

CPU = torch.device("cpu")


def ancestors_one_by_one(parents):
    rows = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        node = i
        while node >= 0:
            rows[i, node] = True
            node = int(parents[node])
    return rows


@pytest.mark.parametrize(
    "tree", [chain(1), chain(7), chain(64), balanced(3, 3), eagle()], ids=["1", "7", "64", "3x3", "eagle"]
)
def test_ancestor_mask_equals_following_parents(tree):
    shape = layout(tree, CPU)
    assert torch.equal(shape.ancestors, ancestors_one_by_one(shape.parents))
    assert torch.equal(shape.depth, shape.ancestors.sum(1) - 1)
    assert (shape.parents[1:] < torch.arange(1, tree.size)).all()


def test_static_shapes_have_the_published_sizes():
    assert chain(5).size == 6
    assert balanced(2, 4).size == 1 + 2 + 4 + 8 + 16
    levels = [sum(len(path) == depth for path in eagle().paths) for depth in range(1, 6)]
    assert levels == [4, 8, 8, 3, 2]


def test_a_tree_file_means_its_paths(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[1], [0], [0, 0]]))
    assert policy(str(file)) == StaticTree(((0,), (1,), (0, 0)))
    file.write_text(text_of(StaticTree(((0,), (1,), (0, 0)))))
    assert policy(str(file)) == StaticTree(((0,), (1,), (0, 0)))


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("[[0, 1]]", "no parent"),
        ("{", "not JSON"),
        ("[]", "has 1 nodes"),
        ('[["a"]]', r'entry 1, \["a"\], is no path: write a list of whole numbers from 0'),
        ("[[true]]", r"entry 1, \[true\], is no path"),
        ("[[0], [-1]]", r"entry 2, \[-1\], is no path"),
        ("[[0], [0.0]]", r"entry 2, \[0.0\], is no path"),
        ("[[0], [1], [0]]", r"entry 3, \[0\], stands there twice"),
        ("[[0], []]", r"entry 2, \[\], is no path"),
        ("[[0], 7]", "entry 2, 7, is no path"),
        ("3", "list of paths"),
        ('{"a": 1}', "list of paths"),
        (json.dumps([[i] for i in range(4096)]), "over 4096 nodes"),
        (json.dumps([[4096]]), "from 0 to 4095"),
        ("[" * 10000, "not JSON"),
        (json.dumps({"paths": [[0]], "checksum": "0"}), "checksum does not match.* if you have edited it"),
        (None, "read"),
    ],
)
def test_a_bad_tree_file_is_named_with_the_reason(tmp_path, content, complaint):
    file = tmp_path / "tree.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(TreeError, match=complaint) as caught:
        policy(str(file))
    assert str(file) in str(caught.value)


NO_TREES = [
    "bush", "chain", "chain:0", "chain:1000", "0x3", "9x9", "1x100", "2x20", "5000x1", "eagle:2",
    "dynamic:depth", "dynamic:width=3", "dynamic:nodes=1", "dynamic:nodes=1000000", "dynamic:topk=100000",
    "dynamic:depth=1000", "dynamic:nodes=nan", "auto:nodes=1", "auto:depth=65", "auto:topk=0", "auto:price=2",
    "sampled:nodes", "sampled:nodes=12.5", "sampled:depth=0", "sampled:width=3", "sampled:price=0",
    "sampled:price=-1", "sampled:price=nan", "sampled:price=1e-9", "sampled:price=inf", "ddtree:nodes=258",
    "confident:depth=0", "confident:threshold=nan", "confident:threshold=1.5", "confident:goal=-1",
]  # fmt: skip


@pytest.mark.parametrize("spec", NO_TREES)
def test_a_tree_that_is_none_is_one_line_that_says_what_there_is(spec):
    with pytest.raises(TreeError, match=r"choose|from \d|over 4,096|options") as caught:
        policy(spec)
    assert "\n" not in str(caught.value)


def test_policies_by_name():
    assert policy("2x3") == policy("balanced:2x3") == balanced(2, 3)
    assert policy("eagle") == eagle()
    assert policy("dynamic:nodes=9,depth=2") == DynamicTree(depth=2, nodes=9)
    assert policy("auto:nodes=20,depth=4,topk=3") == AutoTree(20, 4, 3)
    assert policy("sampled:depth=2,price=0.05") == SampledTree(depth=2, price=0.05)
    assert policy("confident:depth=12,threshold=0.6") == ConfidentChain(12, 0.6)
    assert policy("ddtree") == DDTree()
    assert all(policy(form.example) for form in POLICIES.values())


def test_ties_go_to_the_shallower_candidate():
    assert best_first(torch.tensor([-1.0, -2.0, -1.0, -2.0, -1.0]), 4).tolist() == [0, 2, 4, 1]


FIVE = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])


def test_texts_of_a_batch_have_their_own_positions_and_columns():
    places = positions(DEPTH.expand(2, 5), lengths=[3, 1])
    mask = attention_mask(ancestor_mask(FIVE).expand(2, 5, 5), places)
    assert mask[:, 4].int().tolist() == [[1, 1, 1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1, 0, 1]]
    assert places.tolist() == [[0, 1, 2, 3, 4, 4, 5, 5], [0, 1, 2, 1, 2, 2, 3, 3]]
    for near in (window_mask(places, 5, window=2), chunk_mask(places, 5, chunk=4)):
        assert (mask & near)[0, 4].nonzero().flatten().tolist() == [5, 7]  # its parent and itself
