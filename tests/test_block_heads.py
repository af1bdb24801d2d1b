"""Heads that draft all levels at once: what they draft, one forward a cycle, and trees of their distributions."""

from itertools import product
from math import prod

import pytest
import torch
from commands import complains
from drafters import BLOCK_TEXT, build_dflash, build_p_eagle, draft_dflash_plainly
from models import as_undrafted, close, draft_tree, follow, random_head, seeded, target

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.heads.block import BlockProposer
from treespec.draft.heads.loading import roll_out_drafts
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import list_node_paths


def plain_p_eagle(head, model, text):
    """The same of P-EAGLE: EAGLE-3's head over pairs and masks at once, causal, without a cache."""
    n = len(text) - 1
    learnt = head.mask_hidden[0].expand(head.block, -1)
    fused = head.fuse(torch.cat([model.compute_features(text[None, :-1], head.aux_layers)[0], learnt]))
    tokens = torch.cat([text[1:], torch.full((head.block,), head.mask_token)])
    hidden = head.forward_step(tokens[None], fused[None], torch.arange(len(tokens)))[0]
    return head.compute_logits(hidden[n - 1 :], model)


HEADS = {
    "dflash": (build_dflash, draft_dflash_plainly, {}),
    "dflash from its anchor": (build_dflash, draft_dflash_plainly, {"sample_from_anchor": True}),
    "dflash with windows": (
        build_dflash,
        draft_dflash_plainly,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "dflash with windows that are not causal": (
        build_dflash,
        draft_dflash_plainly,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "causal": [False, False]},
    ),
    "p-eagle": (build_p_eagle, plain_p_eagle, {}),
    "p-eagle of two layers": (build_p_eagle, plain_p_eagle, {"num_hidden_layers": 2}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_training_sees_below_every_pair_what_a_draft_there_does(name):
    make, plain, changes = HEADS[name]
    head = make(**changes)
    model = target("llama")
    counts = torch.ones(1, len(BLOCK_TEXT) - 2, dtype=torch.bool)
    features = model.compute_features(BLOCK_TEXT[None], head.aux_layers)
    states = head(BLOCK_TEXT[None], features[:, :-2], counts, head.max_depth, model.embed_tokens)
    levels = [head.project(level, target=model) for level in states]
    for row in range(len(BLOCK_TEXT) - 2):
        wanted = plain(head, model, BLOCK_TEXT[: row + 2])
        for level in range(min(head.max_depth, len(BLOCK_TEXT) - 2 - row)):
            close(levels[level][row], wanted[level], 2e-4, 1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_levels_equal_the_head_run_over_all_tokens_without_a_cache(name, monkeypatch):
    """Of a text that was observed in pieces after another one, and of one beside it in a batch."""
    make, plain, changes = HEADS[name]
    head = make(**changes)
    model = target("llama")
    other = torch.tensor([4, 44, 2])
    monkeypatch.setattr(model, "choose_chunk_beside", lambda columns: 3)
    proposer = BlockProposer(head, model)
    earlier = torch.tensor([7, 3, 9, 1, 1, 1])
    follow(proposer, model.compute_features(earlier[None, :-1], head.aux_layers)[0], earlier[1:])
    proposer.begin(earlier[-1:])
    proposer.rewind([2])
    beside = proposer.new()
    proposer.join([beside])
    features = [model.compute_features(text[None, :-1], head.aux_layers)[0] for text in (BLOCK_TEXT, other)]
    proposer.observe([features[0][2:4], features[1]], [BLOCK_TEXT[2:5], other])
    proposer.begin(torch.tensor([int(BLOCK_TEXT[4]), 2]))
    proposer.observe([features[0][4:], features[1][:0]], [BLOCK_TEXT[4:], other[-1:]])
    proposer.rewind([8, 1])
    proposer.observe([features[0][:0], features[1][1:]], [BLOCK_TEXT[-1:], other[1:]])
    firsts = proposer.begin(torch.tensor([33, 2]))
    for row, text in enumerate((BLOCK_TEXT, other)):
        expected = plain(head, model, text)
        assert len(expected) == head.max_depth
        close(proposer.compute_all_levels(row), expected, 2e-4, 1e-4)
        close(firsts[row], expected[:1], 2e-4, 1e-4)
    below = proposer.extend([Frontier(torch.tensor([3, 4]), torch.tensor([0, 0])), None])
    assert torch.equal(below[0], proposer.compute_all_levels(0)[1].expand(2, -1))
    rolled = list(roll_out_drafts(head, model, BLOCK_TEXT, features[0], 2))
    for row in range(len(BLOCK_TEXT) - 3):
        expected = plain(head, model, BLOCK_TEXT[: row + 2])[:2]
        close(torch.stack([step[row] for step in rolled]), expected, 2e-4, 1e-4)


@pytest.mark.parametrize(
    "tree, verifier", [("ddtree:nodes=12", "topk"), ("ddtree:nodes=12", "rrs"), ("chain:3", "single")]
)
@pytest.mark.parametrize("make", [build_dflash, build_p_eagle])
def test_one_forward_of_the_head_a_cycle(make, tree, verifier, monkeypatch):
    head = make()
    calls = []
    run = head.run
    monkeypatch.setattr(head, "run", lambda *args: calls.append(1) or run(*args))
    (output,) = as_undrafted(Spec(target("llama"), head, tree, verifier), [BLOCK_TEXT.tolist()], 24)
    assert len(calls) == output.stats.cycles


def test_the_most_likely_tree_has_the_largest_products_of_probabilities():
    head = build_dflash()
    model = target("llama")
    drafter = Spec(model, head, "ddtree:nodes=20", "topk").decoder.drafter
    follow(drafter, model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0], BLOCK_TEXT[1:])
    tree = draft_tree(drafter, BLOCK_TEXT[-1:], SamplingParams(), torch.Generator())
    best = drafter.proposer.compute_all_levels(0).double().softmax(-1).topk(19)
    levels = [dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    worth = {
        path: prod(distribution[token] for distribution, token in zip(levels, path, strict=False))
        for length in range(1, 5)
        for path in product(*levels[:length])
    }
    assert set(list_node_paths(tree)[1:]) == set(sorted(worth, key=lambda path: -worth[path])[:19])


def test_sampled_trees_depend_only_on_the_distributions_of_the_levels():
    """Whatever is drawn, the numbers of draws are the same; a head that drafts level by level is refused."""
    head = build_p_eagle()
    model = target("llama")
    spec = Spec(model, head, "ddtree:nodes=12", "rrs")
    drafter = spec.decoder.drafter
    follow(drafter, model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0], BLOCK_TEXT[1:])
    params = SamplingParams(temperature=1.0)
    shapes = set()
    tokens = set()
    for seed in range(4):
        tree = draft_tree(drafter, BLOCK_TEXT[-1:], params, seeded(seed))
        shapes.add(tuple(tree.parents.tolist()))
        tokens.add(tuple(tree.tokens.tolist()))
        follow(drafter, torch.empty(0, head.feature_size, dtype=torch.float32), torch.empty(0, dtype=torch.int64))
        drafter.rewind([7])
        follow(drafter, model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0][7:], BLOCK_TEXT[8:])
    assert len(shapes) == 1
    assert len(tokens) > 1
    with complains("needs a head that drafts all levels at once"):
        Spec(model, random_head(model), "ddtree", "topk")
