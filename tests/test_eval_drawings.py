"""What the docstrings of eval/ draw on five tokens is what the code computes."""

import numpy as np
import torch

from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.counts import count_surjections
from treespec.eval.acceptance.drafted import count_fewest_cycles, find_in_tops_and_tail
from treespec.eval.acceptance.path_probability import FollowedPair, Pair, PathTerm
from treespec.eval.certify.draws import gather_random_draws, place_tokens
from treespec.eval.certify.ranks import match_successive
from treespec.eval.intervals import leave_one_out
from treespec.eval.report import split_columns
from treespec.eval.system_figures import compute_depth_rates
from treespec.eval.texts import Passage, iterate_counted_runs
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws
from treespec.verify.optimal import Optimal
from treespec.verify.registry import SCHEMES

P = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]], dtype=torch.float64)


def test_a_run_that_counts_begins_after_its_root():
    passage = Passage(torch.arange(5), torch.tensor([False, False, True, True, False]), 0)
    assert list(iterate_counted_runs(passage)) == [(1, 4)]


def test_each_question_is_left_out_once():
    assert leave_one_out(3).tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_a_rate_is_of_the_cycles_that_came_so_far():
    accepted = [2, 1, 0, 1, 0]
    by_depth = [sum(length >= depth for length in accepted) for depth in (1, 2)]
    rates = compute_depth_rates([{"accepted": by_depth}], np.full(2, 5.0), np.ones((2, 1)))
    assert [rate["value"] for rate in rates] == [3 / 5, 1 / 3]


def test_a_wide_table_repeats_its_labels():
    label, first, second = ["label"], ["A"], ["B"]
    assert split_columns([label], [first, second], 12) == [[label, first], [label, second]]


def test_the_rank_of_a_token_ends_inside_its_own_mass():
    coin = torch.rand(1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rank = place_tokens(P, torch.arange(1, 6)[None], torch.tensor([2]), torch.Generator().manual_seed(0))
    assert torch.allclose(rank, 0.3 + coin * 0.4)


def test_an_earlier_draw_has_lost_its_mass():
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]])
    drafts = Drafts(torch.tensor([0]), q, Draws(torch.tensor([[1, 0]])))
    draw_qs, tokens, is_first = gather_random_draws("without replacement", drafts)
    assert torch.equal(draw_qs, torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0], [0.4, 0.0, 0.2, 0.1, 0.0]]))
    assert tokens.tolist() == [1, 0]
    assert is_first.tolist() == [True, False]


def test_successive_numbers_are_paired():
    assert match_successive(torch.arange(5)).tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_two_tokens_share_three_draws_in_six_ways():
    assert count_surjections(2)[:, :5].tolist() == [[1, 1, 1, 1, 1], [0, 2, 6, 14, 30]]


def test_a_text_whose_next_token_is_always_drafted_takes_two_a_cycle():
    assert [count_fewest_cycles(np.ones((length, 2))) for length in (5, 4, 3, 2, 1)] == [3, 2, 2, 1, 1]


def test_distinct_draws_follow_the_certain_tokens():
    q = torch.tensor([[0.6, 0.3, 0.04, 0.03, 0.03]], dtype=torch.float64)
    nodes = Nodes(q.expand(5, -1), q.expand(5, -1), torch.arange(5), torch.Generator(), 1)
    chances = find_in_tops_and_tail(nodes, 5, Optimal(threshold=0.55))  # a row for each token as y
    assert torch.equal(chances[:2], torch.eye(5, dtype=torch.float64)[:2])
    assert (chances[2:, :2] == 0).all()
    assert (chances[2:, 2:] > 0).all()


def test_ways_down_a_tree_of_five_nodes():
    tree = StaticTree(((), (0,), (1,), (0, 0), (0, 1)))
    pair = Pair("topk", "drawn", SCHEMES["topk"], tree, {(): 2, (0,): 2})
    ones = torch.ones(1, dtype=torch.float64)
    followed = FollowedPair(pair, {(): PathTerm(ones, ones)}, [ones])
    nodes = Nodes(P, P, torch.tensor([2]), torch.Generator(), 1)
    followed.follow_level(nodes, True, nodes, {})
    assert [path for path in followed.ways if len(path) == 1] == [(0,), (1,)]
    followed.follow_level(nodes, True, nodes, {})
    assert [path for path in followed.ways if len(path) == 2] == [(0, 0), (0, 1)]
