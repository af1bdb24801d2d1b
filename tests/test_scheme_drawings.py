"""Figures in docstrings of schemes and verifiers are what the code computes."""

import pytest
import torch

from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.conformance import list_text_probabilities
from treespec.verify.conformance_trees import ConformanceTrial, draft_trial_tree
from treespec.verify.distributions import divide_probabilities
from treespec.verify.gumbel import GUMBEL_VERIFIER
from treespec.verify.is_lp import solve, solve_pair_rule
from treespec.verify.judgement_order import list_weight_slots, order_judgement
from treespec.verify.kseq import find_smallest_rho, share_mass
from treespec.verify.optimal import Optimal
from treespec.verify.registry import SCHEMES
from treespec.verify.rrs import iterate_remaining_q
from treespec.verify.walk import build_child_table, index_children, walk_chosen_path

PARENTS = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])
FIVE = TokenTree(torch.tensor([50, 51, 52, 53, 54]), PARENTS, DEPTH, build_ancestor_mask(PARENTS))  # r a b c d
P = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64)


Q = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]], dtype=torch.float64)


def test_a_walk_goes_on_while_a_child_carries_the_output():
    a, b, c, d = 51, 52, 53, 54
    outputs = {0: b, 2: d, 4: 99}
    verdict = walk_chosen_path(index_children(FIVE), outputs.__getitem__)
    assert (verdict.path, verdict.tokens) == ([2, 4], [b, d, 99])
    none = -1
    assert build_child_table(FIVE).tolist() == [
        [none, a, b, none, none],
        [none, none, none, c, none],
        [none, none, none, none, d],
        [none] * 5,
        [none] * 5,
    ]


def test_leaves_are_judged_first():
    """Tokens a to e, as `list_weight_slots` draws them."""
    parents = torch.tensor([-1, 0, 0, 1, 2])
    tokens = torch.tensor([9, 0, 1, 2, 4])
    draws = Draws(torch.tensor([[0, 1], [2, 3], [4, 4]]))
    drafts = Drafts(torch.tensor([0, 1, 2]), Q.expand(3, -1), draws)
    tree = TokenTree(tokens, parents, DEPTH, build_ancestor_mask(parents), drafts)
    places = list_weight_slots(tree, drafts)
    assert places.tolist() == [[1, 2], [3, 8], [4, 4]]
    nodes = drafts.nodes[:, None].expand_as(places)
    order = order_judgement(torch.stack([nodes, draws.tokens, places], -1).tolist())
    assert order.order == [3, 8, 1, 4, 2, 0]
    assert order.rows_by_depth == {0: [0], 1: [1, 2]}
    assert order.above == {1: (0, 0), 2: (0, 1), 3: (1, 2), 8: (1, 3), 4: (2, 4)}


def test_a_refused_draw_leaves_the_residual():
    plan = SCHEMES["single"].plan(P, Q, Draws(torch.tensor([[2]])))
    assert plan[0].tolist() == pytest.approx([1 / 4, 1 / 12, 2 / 3, 0, 0])
    assert SCHEMES["single"].acceptance_rate(P, Q, 1) == pytest.approx(0.6)
    plan = SCHEMES["rrs"].plan(P, Q, Draws(torch.tensor([[2, 1]])))
    assert plan[0].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 0, 0])
    first, second = iterate_remaining_q(Q, torch.tensor([[2, 1]]))
    assert (first[0].tolist(), second[0].tolist()) == ([0.1, 0.2, 0.3, 0.2, 0.2], [0.1, 0.2, 0, 0.2, 0.2])


def test_the_likeliest_tokens_are_certain_while_their_share_is_large():
    q = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]])
    allotment = Optimal(extra=0).split_certain_and_random(q, torch.tensor([[3]]), 3)
    assert allotment.certain.tolist() == [[0, 1, -1]]
    assert allotment.number.tolist() == [[1]]
    assert allotment.rest[0].tolist() == pytest.approx([0, 0, 0.1, 0.06, 0.04])


def test_texts_of_a_trial_and_their_probabilities():
    p = {text: [0.6, 0.4] for text in [(), (0,), (1,)]}
    shares = list_text_probabilities(p, vocab=2, length=2)
    assert shares == {(0, 0): pytest.approx(0.36), (0, 1): 0.24, (1, 0): 0.24, (1, 1): pytest.approx(0.16)}
    rows = {(): [0.4, 0.6], (0,): [0.9, 0.1], (1,): [0.9, 0.1]}
    q = {text: torch.tensor(row).numpy() for text, row in rows.items()}
    tree = draft_trial_tree(q, 2, ConformanceTrial((2, 1), "greedy", 1, 0.1, None))
    assert tree.texts == [(), (1,), (0,), (1, 0), (0, 0)]
    assert tree.parents == [-1, 0, 0, 1, 2]
    assert tree.tokens == [-1, 1, 0, 0, 0]


def plan_of(name, draws, p=P, q=Q):
    return SCHEMES[name].plan(p, q, Draws(torch.tensor([draws])))[0].tolist()


def rate_of(name, k, p=P, q=Q):
    return SCHEMES[name].acceptance_rate(p, q, k).item()


def test_kseq_accepts_each_draw_with_the_same_rule():
    number = torch.tensor([[2]])
    rho = find_smallest_rho(P, Q, number)
    both, beta = share_mass(P, Q, rho)
    assert (rho.item(), beta.item()) == pytest.approx((1.5, 0.5))
    assert both[0].tolist() == pytest.approx([0.1, 0.2, 2 / 15, 1 / 15, 0])
    assert divide_probabilities(P, Q * rho)[0].tolist() == pytest.approx([1, 1, 4 / 9, 1 / 3, 0])
    assert plan_of("kseq", [2, 3]) == pytest.approx([10 / 27, 0, 4 / 9, 5 / 27, 0], abs=1e-9)
    assert rate_of("kseq", 2) == pytest.approx(0.75)


def test_is_lp_selects_one_of_two_draws():
    selected = solve_pair_rule(P, Q, Q, 5).selected
    assert selected[0].tolist() == pytest.approx([0.19, 0.32, 0.33, 0.12, 0.04])
    assert plan_of("is-lp", [2, 1]) == pytest.approx([1 / 16, 15 / 16, 0, 0, 0])
    assert rate_of("is-lp", 2) == pytest.approx(0.79)


def test_the_program_of_is_lp_fills_the_room_of_three_tokens():
    room = torch.tensor([[0.3, 0.1, 0.2]], dtype=torch.float64)
    pairs = torch.tensor([[[0, 0.2, 0.1], [0.2, 0, 0.1], [0.1, 0.1, 0]]], dtype=torch.float64)
    shares = solve(room, pairs)[0]
    assert [shares[0, 1].item(), shares[0, 2].item(), shares[1, 2].item()] == pytest.approx([1, 1, 1])


def test_spechub_pays_for_pairs_with_the_hub():
    assert plan_of("spechub", [3, 2]) == pytest.approx([3 / 7, 1 / 42, 1 / 21, 1 / 2, 0])
    assert rate_of("spechub", 2) == pytest.approx(51 / 70)


def test_greedy_draws_its_last_token_from_the_rest():
    assert plan_of("greedy", [2, 4]) == pytest.approx([6 / 11, 1 / 33, 14 / 33, 0, 0])
    assert rate_of("greedy", 2) == pytest.approx(51 / 70)


def test_topk_samples_from_p_and_typical_takes_the_likeliest_draw():
    q = torch.tensor([[0.15, 0.25, 0.3, 0.2, 0.1]], dtype=torch.float64)
    assert SCHEMES["topk"].draw(q, 2, torch.Generator()).tokens.tolist() == [[2, 1]]
    assert plan_of("topk", [2, 1], q=q) == P[0].tolist()
    assert rate_of("topk", 2, q=q) == pytest.approx(0.5)
    typical = SCHEMES["typical"]
    assert typical.compute_threshold(P).item() == pytest.approx(0.083, abs=1e-3)
    assert plan_of("typical", [2, 1], q=q) == [0, 1, 0, 0, 0]


def test_shared_noise_decides_drafts_and_output():
    noisy_q = torch.tensor([[0.3, 0.9, 1.4, 0.2, -0.5]])
    noisy_p = torch.tensor([[0.1, 1.2, 0.8, 0.6, -0.1]])
    draws = GUMBEL_VERIFIER.scheme.draw(noisy_q, 2, torch.Generator()).tokens[0].tolist()
    assert draws == [2, 1]
    assert noisy_p.argmax().item() == 1
