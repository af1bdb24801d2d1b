"""Several draft models at once: their trees merge by token prefix, and each draw is tested against its own model."""

import itertools

import pytest
import torch
from commands import complains
from drafters import PROMPT, WAYS, near, other_words, source_of, table
from models import as_undrafted, prompt, prompts_of_lengths, small, target
from reference import TEXT_PROB_TOLERANCE, enumerate_texts
from training import save_model

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.merged_tree import merge_trees
from treespec.draft.models.model import ModelProposer
from treespec.draft.models.several import SeveralDrafter
from treespec.draft.spec import DrafterSpec
from treespec.eval.certify.draws import split_models
from treespec.eval.config import EvalConfig
from treespec.eval.ledger import identify_models
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.registry import load_scheme


def build_several(*seeds):
    return SeveralDrafter([ModelProposer(near(seed), table()) for seed in seeds])


def build_tree(tokens, parents, nodes=(), draws=(), q=None):
    parent = torch.tensor(parents)
    ancestors = build_ancestor_mask(parent)
    drafts = None
    if nodes:
        drafts = Drafts(torch.tensor(nodes), q, Draws(torch.tensor(draws)))
    return TokenTree(torch.tensor(tokens), parent, ancestors.sum(1) - 1, ancestors, drafts)


A, B, C, D, ROOT = range(5)


def test_equal_paths_become_one_node_with_the_draws_of_both():
    """As `treespec.draft.models.merged_tree` draws it; the first model has a repeated draw, and an absent one."""
    q = torch.eye(6, dtype=torch.float32)
    first = build_tree(
        [ROOT, A, B, C, A, D], [-1, 0, 0, 1, 0, 4], [0, 1, 4], [[A, B, A], [C, -1, -1], [D, -1, -1]], q[:3]
    )
    second = build_tree([ROOT, A, -1, D, B], [-1, 0, 0, 1, 2], [0, 1, 2], [[A, -1], [D, -1], [B, -1]], q[3:])
    other, tree = merge_trees([[second, first], [first, second]])
    assert sorted(other.tokens.tolist()) == [A, B, C, D, ROOT]
    assert tree.tokens.tolist() == [ROOT, A, B, C, D]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2]
    assert torch.equal(tree.ancestors, build_ancestor_mask(tree.parents))
    assert tree.drafts.nodes.tolist() == [0, 1]
    assert tree.drafts.draws.tokens.tolist() == [[A, A, B, -1, A, -1], [C, D, D, -1, -1, -1]]
    assert tree.drafts.q.tolist() == torch.stack([q[[0, 3]], q[[1, 4]]]).tolist()
    rows = split_models(tree.drafts)
    assert rows.nodes.tolist() == [0, 1, 0, 1]
    assert rows.draws.tokens.tolist() == [[A, B, A], [C, D, -1], [A, -1, -1], [D, -1, -1]]
    assert torch.equal(rows.q, q[[0, 1, 3, 4]])


def test_multi_step_sampling_outputs_the_targets_distribution():
    """Algorithm 2 of SpecInfer by its definition, over all draws of two models."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    qs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0]], dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for draws in itertools.product(range(4), repeat=3):
        weight = qs[0, draws[0]] * qs[1, draws[1]] * qs[0, draws[2]]
        plan = load_scheme("rrs").plan(p[None], qs[None], Draws(torch.tensor([draws])))[0]
        residual = p
        reached = 1.0
        wanted = torch.zeros(4, dtype=torch.float64)
        for token, q in zip(draws, (qs[0], qs[1], qs[0]), strict=True):
            accepted = 0.0
            if q[token]:
                accepted = min(1.0, float(residual[token] / q[token]))
            wanted[token] += reached * accepted
            reached *= 1 - accepted
            rest = (residual - q).clamp(min=0)
            residual = rest / rest.sum().clamp(min=1e-300)
        wanted += reached * residual
        if weight:
            assert torch.allclose(plan, wanted)
        total += weight * plan
    assert torch.allclose(total, p)


@pytest.mark.parametrize(
    "verifier, tree, way",
    [
        pytest.param("rrs", "chain:2", "top-k", marks=pytest.mark.slow),
        ("rrs", "chain:1", "penalties"),
        ("topk", "chain:2", "top-k"),
        ("topk", "chain:2", "greedy"),
    ],
)
def test_texts_have_the_targets_distribution(verifier, tree, way):
    """By enumeration, 64 texts together. Two models need fewer cycles than the first."""
    model = table(end=WAYS[way].end)
    members = [ModelProposer(near(seed), model) for seed in (2, 5)]
    error, cycles = enumerate_texts(Spec(model, SeveralDrafter(members), tree, verifier), way)
    _, cycles_of_one = enumerate_texts(Spec(model, members[0].new(), tree, verifier), way)
    assert error < TEXT_PROB_TOLERANCE
    assert cycles < cycles_of_one or way == "greedy"


def test_two_equal_models_draft_as_one_that_draws_twice():
    """Above temperature 0, by enumeration."""
    error, cycles = enumerate_texts(Spec(table(), build_several(2, 2), "chain:1", "rrs"))
    _, cycles_of_one = enumerate_texts(Spec(table(), ModelProposer(near(2), table()), "2x1", "rrs"))
    assert error < TEXT_PROB_TOLERANCE
    assert cycles == pytest.approx(cycles_of_one, abs=1e-9)


@pytest.mark.parametrize("verifier, temperature", [("auto", 1.0), ("topk", 1.0), ("rrs", 0.0)])
def test_two_equal_models_draft_as_one(verifier, temperature):
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": [1, 2], "batch": 2}
    both = Spec(table(), build_several(2, 2), "2x3", verifier).generate([PROMPT, PROMPT[:3]], **options)
    one = Spec(table(), ModelProposer(near(2), table()), "2x3", verifier).generate([PROMPT, PROMPT[:3]], **options)
    for a, b in zip(both, one, strict=True):
        assert (a.token_ids, a.stats.accepted, a.stats.drafted) == (b.token_ids, b.stats.accepted, b.stats.drafted)


@pytest.mark.parametrize("tree", [None, "dynamic:depth=3,topk=3,nodes=8"])
def test_greedy_texts_are_the_targets_alone_and_together(tree):
    models = [ModelProposer(small(seed), target("llama")) for seed in (5, 6)]
    as_undrafted(Spec(target("llama"), SeveralDrafter(models), tree), prompts_of_lengths(), 16, batch=3)


def test_models_of_other_vocabularies_join_too():
    members = [ModelProposer(near(2), table()), other_words(table())]
    error, _ = enumerate_texts(Spec(table(), SeveralDrafter(members), "chain:1", "rrs"))
    assert error < TEXT_PROB_TOLERANCE


def test_folders_are_joined_by_a_plus(tmp_path):
    folder = save_model(tmp_path / "target")
    for name, layers in (("a", 1), ("b", 2), ("c+d", 1)):
        save_model(tmp_path / name, num_hidden_layers=layers)
    name = f"model:{tmp_path}/a+{tmp_path}/b"
    spec = load(str(folder), drafter=name, dtype="float32", verifier="rrs")
    assert "2 models, static tree of 4 nodes, 4 deep" in repr(spec)
    as_undrafted(spec, [prompt(5)], 8)
    assert DrafterSpec.parse(name).short == "model:a+b"
    files = identify_models(EvalConfig(target=str(folder), drafter=name, out=str(tmp_path / "run")))
    assert len(set(files["the files of drafter 1"].split())) == 2
    assert DrafterSpec.parse(f"model:{tmp_path}/c+d").places == [f"{tmp_path}/c+d"]
    assert DrafterSpec.parse("suffix:nodes=9+model:a").members[1].places == ["a"]


def test_what_cannot_be_joined_is_one_line():
    with complains("verifier rrs-wo takes the draws of one draft model: with several take --verifier rrs"):
        Spec(table(), build_several(2, 3), "chain:2", "rrs-wo")
    with complains("the auto tree is chosen by the cost of one draft model"):
        Spec(table(), build_several(2, 3), "auto")
    with complains("suffix drafts beside one model: take suffix.model:a, or model:a.b alone"):
        source_of("suffix+model:a+b", table())
    with complains("model:a. names no directory: write model:PATH"):
        DrafterSpec.parse("model:a+")
