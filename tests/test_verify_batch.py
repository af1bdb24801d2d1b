"""Verification of a batch: copies to the host are shared, errors are values, and only visited rows decide."""

import math

import pytest
import torch
from models import randn, seeded

from treespec.sampling.noise import Noise
from treespec.sampling.probs import SamplingParams, choose_greedy, choose_greedy_token
from treespec.sampling.sampler import Sampler
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import TokenTree
from treespec.verify import verdict as verdicts
from treespec.verify.batch import count_by_depth, verify_trees
from treespec.verify.gumbel import AUTO_VERIFIER
from treespec.verify.topk import TopK
from treespec.verify.verdict import DeviceStep, HostSync, Verdict, as_step, finish_step, finish_steps
from treespec.verify.walk import Walk

PARENTS = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])
TREE = TokenTree(torch.tensor([9, 1, 2, 3, 4]), PARENTS, DEPTH, build_ancestor_mask(PARENTS))
OUTPUTS = [2, 0, 4, 0, 5]  # at the nodes: the path is 2, 4, and 5 follows it


def logits_of(outputs, dtype=torch.float32):
    return torch.nn.functional.one_hot(torch.tensor(outputs), 10).to(dtype)


def verify(logits, sampler=None, verifier=AUTO_VERIFIER, tree=TREE):
    (found,) = verify_trees(verifier, [tree], [logits], [sampler or Sampler(SamplingParams())], [seeded(0)])
    return found


@pytest.fixture
def copies(monkeypatch):
    """The numbers of tensors in each copy to the host."""
    sizes = []

    def to_host(tensors):
        if tensors:
            sizes.append(len(tensors))
        return [tensor.clone() for tensor in tensors]

    monkeypatch.setattr(verdicts, "to_host", to_host)
    return sizes


def steps_of(*numbers):
    """The step of a sequence that needs these numbers one after another; its verdict has them as its tokens."""

    def step(ahead, found):
        if not ahead:
            return Verdict([], found)
        return DeviceStep(torch.tensor(ahead[0]), lambda copy: step(ahead[1:], [*found, int(copy)]))

    return step(numbers, [])


def test_two_sequences_share_one_copy_as_drawn(copies):
    found = finish_steps([steps_of(3), steps_of(5, 7)], HostSync())
    assert [one.tokens for one in found] == [[3], [5, 7]]
    assert copies == [2, 1]


def test_the_first_copy_brings_earlier_requests_too(copies):
    sync = HostSync()
    request = sync.request(torch.tensor(8))
    finish_steps([steps_of(3)], sync)
    assert int(request.on_host) == 8
    assert copies == [2]
    sync.flush()
    assert copies == [2]


def test_an_error_in_a_phase_ends_its_sequence_only():
    broken = DeviceStep(torch.tensor(1), lambda copy: Verdict([], [1 // (int(copy) - 1)]))
    early = ValueError("before the first copy")
    found = finish_steps([broken, steps_of(3, 4), early], HostSync())
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1:] == [Verdict([], [3, 4]), early]


def test_a_verifier_may_be_a_generator_function(copies):
    """It may hand over to a step, too."""

    def verify_on_device():
        first = yield torch.tensor(3)
        inner = yield from steps_of(5, 7)
        return Verdict([], [int(first), *inner.tokens])

    assert finish_step(as_step(verify_on_device())).tokens == [3, 5, 7]
    assert finish_steps([as_step(verify_on_device())], HostSync()) == [Verdict([], [3, 5, 7])]
    assert copies == [1] * 6


def test_nodes_are_counted_by_depth_as_drawn():
    assert count_by_depth([0, 1, 1, 2, 2]) == [2, 2]
    assert count_by_depth([0]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_most_likely_tokens_make_the_path(dtype):
    found = verify(logits_of(OUTPUTS, dtype))
    assert (found.path, found.tokens, found.drafted) == ([2, 4], [2, 4, 5], [2, 2])
    assert found == finish_step(Walk(TopK()).verify_on_device(TREE, logits_of(OUTPUTS), seeded(0)))


def test_logits_that_are_no_numbers_end_a_path_where_they_are_visited():
    """Their output is V, which is no token, whatever the sign of the NaN."""
    for nan in (math.nan, -math.nan):
        for params in (SamplingParams(), SamplingParams(1.0)):
            logits = 200.0 * logits_of(OUTPUTS)
            sampler = Sampler(params)
            if not params.greedy:
                sampler.noise = Noise(7, 10, torch.device("cpu"))
            logits[1, 3] = nan  # nobody visits node 1
            assert verify(logits, sampler).tokens == [2, 4, 5]
            logits[4, 3] = nan
            assert verify(logits, sampler).tokens == [2, 4, 10]


def test_the_choice_at_a_node_is_that_of_all_rows_at_once():
    """Ties too, in rows short and long."""
    for size in (10, 999, 49_152):
        logits = randn(4, size, generator=seeded(size)).mul(2).round().bfloat16()
        logits[3, size // 2] = math.nan
        assert [choose_greedy_token(row) for row in logits] == choose_greedy(logits).tolist()
        assert [choose_greedy_token(row) for row in logits] == [int(choose_greedy(row[None])) for row in logits]


def test_an_error_of_one_sequence_is_its_result():
    logits = logits_of(OUTPUTS)
    samplers = [Sampler(SamplingParams()), Sampler(SamplingParams(1.0))]
    broken = type("Broken", (), {"__call__": lambda *_: 1 // 0})()
    found = verify_trees(broken, [TREE, TREE], [logits, logits], samplers, [seeded(0), seeded(0)])
    assert found[0].tokens == [2, 4, 5]
    assert isinstance(found[1], ZeroDivisionError)
