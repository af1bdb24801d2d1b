"""Planted faults are not certified: each p-value is far below its error, so that a seed hardly matters."""

from dataclasses import replace

import faults
import pytest
import torch
from certifying import CONFIG, PROMPTS, tiny
from scipy.stats import kstest

from treespec.eval.certify.places import places
from treespec.eval.certify.run import TESTS, Examination
from treespec.eval.certify.statistics import least_gap

DRAWS = "draws follow their reported distribution"
POWERS = "draws are not from a power of it"
REPEATS = "draws do not repeat them more often, or less"
CYCLES = "cycles are independent of the cycle before"
TOKENS = "tokens follow the target's distribution, by p/q"
FIRST = "first tokens of cycles follow it, by p over the reported q"


def p_values(spec, tokens, seed=0):
    """By question; plain texts are not compared."""
    examined = Examination(spec, PROMPTS, replace(CONFIG, tokens=tokens, seed=seed))
    return {test["test"]: test["p_value"] for test in examined.judge([], examined.sample(), [])["tests"][1:]}


def wrong_residual(scheme, p, q, draws):
    first = draws.tokens[:, :1].clamp(min=0)
    accepted = (p.gather(1, first) / q.gather(1, first)).clamp(max=1)
    return (p * (1 - accepted)).scatter_add_(1, first, accepted)


def cold(scheme, p, q, draws):
    return faults.normal(p**2)


def before_truncation(scheme, q, k, generator):
    return scheme.draw(q * (q >= q.topk(3).values[..., -1:]), k, generator)


@pytest.mark.parametrize(
    ("tree", "verifier", "tokens", "plant", "question"),
    [
        ("64x1", "rrs", 400, faults.draws_from_a_hotter_law, POWERS),
        ("4x2", "optimal", 96, faults.phantoms_dropped, REPEATS),
        ("chain:1", "single", 1600, faults.coins_reused, FIRST),
        ("chain:3", "single", 200, faults.seeded_anew, CYCLES),
        ("chain:1", "single", 600, lambda spec: faults.change(spec, planning=wrong_residual), FIRST),
        ("8x1", "rrs-wo", 100, lambda spec: faults.change(spec, drawing=before_truncation), DRAWS),
        ("chain:1", "single", 600, lambda spec: faults.change(spec, planning=cold), TOKENS),
    ],
    ids=["hotter draws", "phantoms", "coins reused", "seeded again", "residual", "before top-p", "temperature"],
)
def test_planted_faults_are_found(tree, verifier, tokens, plant, question):
    spec = tiny(tree, verifier)
    plant(spec)
    found = p_values(spec, tokens)
    assert found[question] < CONFIG.error / TESTS, found


def test_a_fault_of_the_size_that_the_verdict_names_is_found_and_one_of_a_fifth_is_not():
    """More of the most likely token. A share of this fault makes a share of its gap."""

    def tested(share, tokens):
        def plan(scheme, p, q, draws):
            top = torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)
            return (1 - share) * type(scheme).plan(scheme, p, q, draws) + share * top

        spec = tiny("chain:1", "single")
        faults.change(spec, planning=plan)
        texts = Examination(spec, PROMPTS, replace(CONFIG, tokens=tokens)).sample()
        return torch.cat([place.by_p for place in places(spec, texts)]).numpy()

    size = least_gap(500, CONFIG.error / TESTS) / kstest(tested(1.0, 1000), "uniform").statistic
    assert size < 1
    assert kstest(tested(size, 500), "uniform").pvalue < CONFIG.error / TESTS
    assert kstest(tested(size / 5, 500), "uniform").pvalue > CONFIG.error / TESTS


def test_a_chain_that_drops_the_doubted_token_is_found(monkeypatch):
    faults.doubted_token_dropped(monkeypatch)
    assert p_values(tiny("confident:depth=3,threshold=0.2", "single"), 96)[POWERS] < CONFIG.error / TESTS
