"""The kit for other people's verifiers: exact ones pass, and it names the smallest tables of a wrong one."""

from inspect import signature

import numpy as np
import pytest
import torch
from transformers.generation.utils import _speculative_sampling

from treespec.verify import conformance
from treespec.verify.conformance import PLANTED_FAULTS, build_recursive_rejection, check, run_checks
from treespec.verify.conformance_schemes import check_scheme
from treespec.verify.conformance_verifiers import build_verifier_judge
from treespec.verify.registry import load_scheme, load_verifier
from treespec.verify.rrs import RRS
from treespec.verify.single import Single

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
    runs = 8 if name == "kseq" else 20  # it solves an equation at each node
    found = check(ours(name), widths, draws, runs=runs)
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
    """Recursive rejection takes draws without replacement for independent ones."""
    found = check(
        build_recursive_rejection(np.random.default_rng(0)), (2,), "without replacement", array=np.asarray, **CYCLES
    )
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

    found = check(theirs, (1, 1), runs=200)  # of a chain; with 700 no planted fault is missed, as above
    assert found.passed, str(found)


class Unscaled(Single):
    """A residual that is p itself: refused draws are answered by p."""

    def plan(self, p, q, draws):
        accept = (p / q).gather(1, draws.tokens).clamp(max=1)
        return ((1 - accept) * p).scatter_add(1, draws.tokens, accept)


class Boastful(RRS):
    """Right texts, wrong words about itself."""

    random_draws = "without replacement"

    def acceptance_rate(self, p, q, k):
        return torch.ones(len(p))


@pytest.mark.parametrize("name", ["single", "rrs", "rrs-wo", "spechub", "greedy", "topk"])
def test_a_scheme_of_treespec_keeps_the_rule_on_every_small_p_and_q(name):
    found = check_scheme(load_scheme(name), rows=400)
    assert (found.passed, found.remarks) == (True, []), str(found)


def test_a_wrong_scheme_is_found_by_the_smallest_example():
    found = check_scheme(Unscaled(), rows=2000)
    assert str(found.case) == "2 tokens, 1 draw, p = (1/2, 1/2), q = (1, 0)"
    assert found.fault == "the output is (0.750, 0.250)"
    typical = check_scheme(load_scheme("typical", allow_lossy=True), rows=2000)
    assert len(typical.case.p) == 2
    assert typical.case.draws == 1


def test_a_scheme_that_is_right_and_says_what_is_not_so_passes_with_remarks():
    found = check_scheme(Boastful(), rows=2000)
    assert found.passed
    rate, draws = found.remarks
    assert "acceptance_rate is wrong at 2 tokens, 1 draw, p = (1, 0), q = (0, 1): it says 1.000" in rate
    assert "random_draws says without replacement" in draws


def test_what_is_no_plan_or_fails_is_said():
    class Failing(Single):
        def plan(self, p, q, draws):
            raise RuntimeError("no such row")

    class Short(Single):
        def plan(self, p, q, draws):
            return p / 2

    assert check_scheme(Failing(), rows=100).fault == "the scheme fails with RuntimeError: no such row"
    assert check_scheme(Short(), rows=100).fault == "a plan sums to 0.500"


def test_the_command_says_a_verdict_on_each(tmp_path, monkeypatch, capsys):
    (tmp_path / "trial.py").write_text(
        "from treespec.verify.single import Single\nfrom treespec.verify.traversal import TRAVERSAL_VERIFIER\n"
        "class Wrong(Single):\n    def plan(self, p, q, draws):\n        return q\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run_checks(["single", "trial:Wrong"]) == 1
    right, wrong = capsys.readouterr().out.splitlines()
    assert right.startswith("single: lossless on 218 pairs of p and q")
    assert wrong.startswith("trial:Wrong: not lossless. The smallest example: 2 tokens, 1 draw, p = (1, 0), q = (0, 1)")
    assert run_checks(["trial:Right"]) == 2
    assert "trial has no Right" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["traversal", "block"])
def test_a_verifier_of_whole_trees_is_tested_by_its_texts(name, monkeypatch):
    monkeypatch.setattr(conformance, "VERIFIER_RUNS", 15)
    found = conformance.check_verifier(load_verifier(name))
    assert found.passed, str(found)
