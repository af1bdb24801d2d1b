"""The kit for other people's verifiers: exact ones pass, and it names the smallest tables of a wrong one."""

from inspect import signature

import numpy as np
import pytest
import torch
from transformers.generation.utils import _speculative_sampling

from treespec.verify.conformance import PLANTED_FAULTS, build_recursive_rejection, check
from treespec.verify.conformance_verifiers import build_verifier_judge
from treespec.verify.registry import load_verifier

CYCLES = {"runs": 700}


def ours(name):
    """A verifier of treespec, on the kit's trees."""
    return build_verifier_judge(load_verifier(name))


OURS = [
    *(("independent", name, (1, 1)) for name in ("single", "block")),
    *(("independent", name, (2, 1)) for name in ("rrs", "kseq")),
    *(("without replacement", name, (2, 1)) for name in ("rrs-wo", "traversal")),
    ("greedy", "topk", (2, 1)),
]


@pytest.mark.parametrize("draws, name, widths", OURS)
def test_treespecs_own_verifiers_pass(draws, name, widths):
    found = check(ours(name), widths, draws, runs=250)
    assert found.passed, str(found)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1)])
def test_each_planted_fault_is_found_and_the_same_without_it_passes(widths):
    exact = check(build_recursive_rejection(np.random.default_rng(0)), widths, array=np.asarray, **CYCLES)
    assert exact.passed, str(exact)
    assert exact.missed == []
    for fault in PLANTED_FAULTS:
        found = check(build_recursive_rejection(np.random.default_rng(0), fault), widths, array=np.asarray, **CYCLES)
        assert not found.passed, fault
        wrong = found.counterexample
        assert sum(wrong.should.values()) == pytest.approx(1)
        assert sum(wrong.are.values()) == pytest.approx(1)
        assert f"{wrong.shifted:.1%} of the probability is shifted" in str(found)


def test_the_counterexample_is_the_smallest():
    """Two tokens and one level show a plain mistake; a uniform that is used twice needs two drafts."""
    sizes = {}
    for fault in PLANTED_FAULTS:
        wrong = check(
            build_recursive_rejection(np.random.default_rng(0), fault), array=np.asarray, **CYCLES
        ).counterexample
        sizes[fault] = len(wrong.q[()]), max(map(len, wrong.q))
    assert sizes["a refused draft answered by p"] == (2, 1)
    assert sizes["the last token by p squared"] == (2, 1)
    assert sizes["one uniform number for all drafts"][1] == 2


def test_a_verifier_for_other_draws_is_found_out():
    """rrs takes draws without replacement for independent ones."""
    found = check(ours("rrs"), (2,), "without replacement", **CYCLES)
    assert not found.passed


def test_an_answer_that_no_path_gives_is_refused():
    for answer in ([], [0, 0, 0], [7]):
        with pytest.raises(ValueError, match="the verifier gives"):
            check(lambda *_, answer=answer: answer, (1,), runs=1)


def test_speculative_sampling_of_transformers_passes():
    """It takes logits of a chain, q after each token of it."""
    torch.manual_seed(0)
    ends = [False] * ("last_assistant_token_is_eos" in signature(_speculative_sampling).parameters)  # older versions

    def theirs(p, q, tokens, parents):
        chain = tokens[None, 1:]
        length = len(tokens) - 1
        kept, matches = _speculative_sampling(chain, q[None, :-1].log(), length, p[None].log(), *ends)
        return kept[0, : int(matches) + 1].tolist()

    found = check(theirs, (1, 1), **CYCLES)
    assert found.passed, str(found)
    assert found.missed == []
