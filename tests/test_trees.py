"""Trees: shapes, masks, EAGLE-2's choice of nodes, files, and trees from accuracies against all trees there are."""

import itertools
import json
from collections import Counter
from functools import cache

import pytest
import torch
from commands import complains, treespec
from drafters import build_head
from models import close, seeded, target

from treespec.api.spec import Spec
from treespec.draft.heads.loading import build_new_head, roll_out_drafts
from treespec.eval.fit import measure_accuracies
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.dynamic import AutoTree, DDTree, DynamicTree
from treespec.trees.layout import get_layout
from treespec.trees.mask import (
    build_ancestor_mask,
    build_attention_mask,
    build_window_mask,
    chunk_mask,
    compute_positions,
)
from treespec.trees.most_likely import build_most_likely_tree, estimate_length
from treespec.trees.policy import TREE_FORMS_TABLE, parse_policy
from treespec.trees.sequoia import build_sequoia_tree, solve_trees
from treespec.trees.static import StaticTree, TreeError, build_balanced_tree, build_chain, build_eagle_tree, format_tree
from treespec.trees.tree import argsort_descending

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
    "tree",
    [build_chain(1), build_chain(7), build_chain(64), build_balanced_tree(3, 3), build_eagle_tree()],
    ids=["1", "7", "64", "3x3", "eagle"],
)
def test_ancestor_mask_equals_following_parents(tree):
    shape = get_layout(tree, CPU)
    assert torch.equal(shape.ancestors, ancestors_one_by_one(shape.parents))
    assert torch.equal(shape.depth, shape.ancestors.sum(1) - 1)
    assert (shape.parents[1:] < torch.arange(1, tree.size)).all()


def test_static_shapes_have_the_published_sizes():
    assert build_chain(5).size == 6
    assert build_balanced_tree(2, 4).size == 1 + 2 + 4 + 8 + 16
    for name, levels in {"eagle": [4, 8, 8, 3, 2], "medusa": [10, 28, 23, 2]}.items():
        assert [*Counter(map(len, parse_policy(name).paths[1:])).values()] == levels


def test_a_tree_file_means_its_paths(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[1], [0], [0, 0]]))
    assert parse_policy(str(file)) == StaticTree(((0,), (1,), (0, 0)))
    file.write_text(format_tree(StaticTree(((0,), (1,), (0, 0)))))
    assert parse_policy(str(file)) == StaticTree(((0,), (1,), (0, 0)))


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
    ],
)
def test_a_bad_tree_file_is_named_with_the_reason(tmp_path, content, complaint):
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(TreeError, match=complaint) as caught:
        parse_policy(str(file))
    assert str(file) in str(caught.value)


NO_TREES = """
bush chain chain:0 chain:1000 0x3 9x9 1x100 2x20 5000x1 eagle:2 dynamic:depth dynamic:width=3 dynamic:nodes=1
dynamic:nodes=1000000 dynamic:topk=100000 dynamic:depth=1000 dynamic:nodes=nan auto:nodes=1 auto:depth=65
auto:topk=0 auto:price=2 sampled ddtree:nodes ddtree:nodes=12.5 ddtree:depth=0 ddtree:nodes=258
"""


@pytest.mark.parametrize("spec", NO_TREES.split())
def test_an_invalid_tree_is_refused_by_a_line_with_the_choices(spec):
    with pytest.raises(
        TreeError, match=r"choose|from \d|over 4,096|options|needs a length|must be 1 to|write eagle"
    ) as caught:
        parse_policy(spec)
    assert "\n" not in str(caught.value)


def test_policies_by_name():
    assert parse_policy("2x3") == parse_policy("balanced:2x3") == build_balanced_tree(2, 3)
    assert parse_policy("eagle") == build_eagle_tree()
    assert parse_policy("dynamic:nodes=9,depth=2") == DynamicTree(depth=2, nodes=9)
    assert parse_policy("auto:nodes=20,depth=4,topk=3") == AutoTree(20, 4, 3)
    assert parse_policy("ddtree") == DDTree()
    assert all(parse_policy(form.example) for form in TREE_FORMS_TABLE.values())


def test_ties_go_to_the_shallower_candidate():
    assert argsort_descending(torch.tensor([-1.0, -2.0, -1.0, -2.0, -1.0]), 4).tolist() == [0, 2, 4, 1]


FIVE = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])


def test_texts_of_a_batch_have_their_own_positions_and_columns():
    places = compute_positions(DEPTH.expand(2, 5), lengths=[3, 1])
    mask = build_attention_mask(build_ancestor_mask(FIVE).expand(2, 5, 5), places)
    assert mask[:, 4].int().tolist() == [[1, 1, 1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1, 0, 1]]
    assert places.tolist() == [[0, 1, 2, 3, 4, 4, 5, 5], [0, 1, 2, 1, 2, 2, 3, 3]]
    for near in (build_window_mask(places, 5, window=2), chunk_mask(places, 5, chunk=4)):
        assert (mask & near)[0, 4].nonzero().flatten().tolist() == [5, 7]  # its parent and itself


@cache
def all_trees(nodes, depth, ranks):
    """Every tree of `nodes` nodes, root included, as sorted paths. A node's children have the ranks 0, 1, …"""
    if nodes == 1:
        return {()}
    found = set()
    for paths in all_trees(nodes - 1, depth, ranks):
        known = {(), *paths}
        for parent in known:
            rank = sum(path[:-1] == parent for path in paths)
            if len(parent) < depth and rank < ranks:
                found.add(tuple(sorted((*paths, (*parent, rank)))))
    return found


def table_of(seed, depth=3, ranks=3, descending=True):
    table = torch.rand(depth, ranks, generator=seeded(seed), dtype=torch.float64)
    table = table / (1.3 * table.sum(1, keepdim=True))
    return (table.sort(1, descending=True).values if descending else table).numpy()


@pytest.mark.parametrize("seed", range(3))
def test_the_expected_length_is_that_of_enumerated_outcomes(seed):
    """At each depth one rank is right, or none; a path is accepted while it holds the right ranks."""
    table = table_of(seed)
    tree = build_most_likely_tree(table, 9)
    wanted = 0.0
    for ranks in itertools.product(range(4), repeat=3):
        chance = 1.0
        accepted = 0
        for d, rank in enumerate(ranks):
            chance *= float(table[d, rank]) if rank < 3 else 1 - float(table[d].sum())
        while accepted < 3 and tuple(ranks[: accepted + 1]) in tree.paths:
            accepted += 1
        wanted += chance * (1 + accepted)
    assert estimate_length(tree, table) == pytest.approx(wanted)


@pytest.mark.parametrize("nodes", range(2, 7))
def test_measured_trees_are_the_best_of_all(nodes):
    for seed in range(3):
        table = table_of(seed)
        best = max(estimate_length(StaticTree(paths), table) for paths in all_trees(nodes, 3, 3))
        tree = build_most_likely_tree(table, nodes)
        assert tree.size == nodes
        assert estimate_length(tree, table) == pytest.approx(best)


@pytest.mark.parametrize("nodes, depth", [(2, 1), (3, 2), (4, 1), (5, 3), (6, 2), (6, 5)])
@pytest.mark.parametrize("descending", [True, False])
def test_sequoias_trees_are_the_best_of_all(nodes, depth, descending):
    """Also where a later child is likelier than an earlier one, and with rates of their own at the root."""
    for seed in range(3):
        at_root, rates = table_of(seed, 2, 3, descending)
        for first in (rates, at_root):
            table = [first, *[rates] * (depth - 1)]
            solved = solve_trees(rates, nodes, depth, first)
            tree = solved.build_tree(nodes, depth)
            best = max(estimate_length(StaticTree(paths), table) for paths in all_trees(nodes, depth, 3))
            assert (tree.size, tree.max_depth <= depth) == (nodes, True)
            assert estimate_length(tree, table) == pytest.approx(best)
            assert float(solved.tokens[depth, nodes]) == pytest.approx(best)
        assert build_sequoia_tree(rates, nodes, depth) == solve_trees(rates, nodes, depth).build_tree(nodes, depth)


def test_a_tree_without_room_shrinks_and_no_room_is_refused():
    assert build_sequoia_tree([0.5, 0.2], 9, 2).size == 7
    assert build_most_likely_tree([[0.5, 0.2], [0.4, 0.0]], 9).size == 5
    assert build_sequoia_tree([0.0, 0.0], 3, 2).size == 3
    with pytest.raises(TreeError, match="never right"):
        build_most_likely_tree([[0.0, 0.0]] * 2, 9)
    with pytest.raises(TreeError, match="at least 2 nodes"):
        build_sequoia_tree([0.5], 1, 2)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_accuracies_equal_counting_position_by_position(kind, temperature):
    model = target("llama")
    head = build_head(model, kind) if kind != "eagle" else build_new_head(kind, model)
    generator = seeded(0)
    rows = []
    for length in (20, 5, 3, 1):
        tokens = torch.randint(3, 64, (length,), generator=generator)
        rows.append((tokens, torch.rand(length, generator=generator) < 0.7, model.compute_features(tokens[None])[0]))
    found = measure_accuracies(Spec(model, head), rows, 3, 5, temperature)
    wanted = torch.zeros(3, 5).double()
    positions = 0
    for tokens, counts, features in rows:
        drafts = list(roll_out_drafts(head, model, tokens, features, 3))
        for t in range(len(tokens) - 4):
            if counts[t + 2]:
                positions += 1
                for d in range(3):
                    distribution = compute_probs(
                        model.compute_output_logits(features[t + d + 1]), SamplingParams(temperature)
                    )
                    wanted[d] += distribution[drafts[d][t].topk(5).indices].double()
    assert positions > 5
    close(found, wanted / positions, 1e-6)
    with complains("too short"):
        measure_accuracies(Spec(model, head), rows[2:], 3, 5)


@pytest.mark.parametrize("kind, nodes", [("medusa", 9), ("sequoia", 9), ("sequoia", 0)])
def test_a_tree_made_on_the_command_line_is_one_that_decodes(kind, nodes, model_folder, tmp_path, monkeypatch, capsys):
    """With --nodes 0 the times of this machine choose the size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_head(build_head(Target.load(str(model_folder)), "hydra"), tmp_path / "head")
    (tmp_path / "text.txt").write_text("the user asks and the assistant answers the question " * 12)
    models = f"--target {model_folder} --head {tmp_path}/head --dtype float32"
    options = f"--text {tmp_path}/text.txt --kind {kind} --nodes {nodes} --temperature 1 --out {tmp_path}/tree.json"
    assert treespec(f"tree {models} {options}") == 0
    size = 1 + len(json.loads((tmp_path / "tree.json").read_text())["paths"])
    assert f"A tree of {size} nodes" in capsys.readouterr().out.replace("\n", " ")
    assert size == nodes or not nodes
    said = f"--prompt 'the question' --max-new-tokens 8 --tree {tmp_path}/tree.json"
    assert treespec(f"generate {models} {said}") == 0


def test_a_rank_that_is_never_right_leaves_its_siblings():
    assert build_most_likely_tree([[0, 0.5], [0.3, 0.1]], 3).paths == ((), (1,), (1, 0))
