"""Exact τ: each share and each way is its enumeration, τ is that of the real loop, and texts end as their cycles do."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import complains
from drafters import NEW, PROMPT, TABLE_VOCAB, build_tree_pair, spec_of
from models import seeded
from reference import enumerate_decoding, every_pair, list_draws, scheme_by_name
from torch.nn.functional import pad

from treespec.draft.auto.cost import CycleCost
from treespec.eval.acceptance.acceptance_shares import SHARES_BY_SCHEME, Nodes
from treespec.eval.acceptance.config import TauConfig, find_draw_scheme
from treespec.eval.acceptance.decoded import Decoded, Simulated
from treespec.eval.acceptance.path_probability import follow_pairs, share_by_samples
from treespec.eval.acceptance.planned import Planned, follow_planned
from treespec.eval.acceptance.simulated import count_lengths, simulate_totals
from treespec.eval.acceptance.tau import count_cycle_starts, measure_tau
from treespec.eval.acceptance.teacher_forced import predict_levels, run_teacher_forced
from treespec.eval.texts import Text
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.policy import parse_policy
from treespec.trees.tree import Draws
from treespec.verify.registry import load_verifier

# Samples; the standard error of a share is below 0.5 / sqrt(1600), and none may be five of them off.
SAMPLED = 1600
NOISE = 0.065
SURE = "block-optimal:threshold=0,extra=0"  # all draws but the last


def first(tokens, y, k):
    drawn = tokens[:, :k] == y
    return drawn & (drawn.cumsum(1) == 1)


def enumerated(scheme, p, q, k):
    """[V, k] Pr(the output is y, and draw i is the first of y), from all draws; of scores from many samples."""
    if scheme.name == "optimal":
        draws = scheme.draw(q.expand(4 * SAMPLED, -1), k, seeded(1))
        tokens = draws.tokens
        chance = torch.full((4 * SAMPLED,), 1 / (4 * SAMPLED), dtype=torch.float64)
    else:
        found = list_draws(scheme.name, q, k)
        tokens = torch.tensor([d for d, _ in found])
        chance = torch.tensor([c for _, c in found], dtype=torch.float64)
        draws = Draws(tokens)
    plan = scheme.plan(p.expand(len(tokens), -1), q.expand(len(tokens), -1), draws) * chance[:, None]
    return torch.stack([(first(tokens, y, k) * plan[:, y : y + 1]).sum(0) for y in range(len(p))])


def raced(p, q, k):
    """`enumerated` of the verifier over noise, by sampling the noise."""
    times = torch.empty(4 * SAMPLED, len(p), dtype=torch.float64).exponential_(generator=seeded(2))
    tokens = (times / q).topk(k, largest=False).indices
    tokens = tokens.masked_fill(q[tokens] == 0, -1)
    output = (times / p).argmin(-1)
    shares = [(first(tokens, y, k) & (output == y)[:, None]).double().mean(0) for y in range(len(p))]
    return torch.stack(shares)


@pytest.mark.parametrize("name", SHARES_BY_SCHEME)
def test_what_a_draw_carries_is_its_enumeration(name):
    scheme = scheme_by_name(find_draw_scheme(name))
    for k, (p, q) in product((1, 2, 3), every_pair(1)[: 1 if name == "optimal" else None]):
        if scheme.max_draws and k > scheme.max_draws:
            continue
        noisy = name in ("spechub", "is-lp", "optimal", "gumbel") or (name == "rrs-wo" and k > 1)
        size = len(p)
        nodes = Nodes(p.expand(size, -1), q.expand(size, -1), torch.arange(size), seeded(0), 1)
        many = Nodes(*(x.repeat_interleave(SAMPLED, 0) for x in (nodes.p, nodes.q, nodes.y)), seeded(0), 1)
        found = SHARES_BY_SCHEME[name](many if noisy else nodes, k, scheme)
        found = found.view(size, -1, k).mean(1)
        wanted = raced(p, q, k) if name == "gumbel" else enumerated(scheme, p, q, k)
        if name in ("greedy", "topk") and len(q.unique()) < size:  # of equal q either may be drawn
            continue
        if name in ("greedy", "topk", "is-lp", "optimal"):  # the split of these is by few samples
            assert (found.sum(1) - wanted.sum(1)).abs().max() < (NOISE if noisy else 1e-12)
        else:
            assert (found - wanted).abs().max() < (NOISE if noisy else 1e-12)


@pytest.mark.parametrize("name", ["single", "rrs", "kseq", "rrs-wo", "greedy", "topk"])
def test_what_a_draw_of_any_scheme_carries_is_found_by_samples(name):
    """Rates by samples serve schemes of other packages, which give no formula."""
    scheme = scheme_by_name(name)
    for k, (p, q) in product((1, 2), every_pair(1)[::3]):
        if (scheme.max_draws and k > scheme.max_draws) or len(q.unique()) < len(q):
            continue
        size = len(p)
        nodes = Nodes(p.expand(size, -1), q.expand(size, -1), torch.arange(size), seeded(0), SAMPLED)
        found = share_by_samples(nodes, k, scheme)
        assert (found - enumerated(scheme, p, q, k)).abs().max() < NOISE


@torch.no_grad()
def cycles_of(verifier, shape, spec, text, samples=400, **options):
    """The mean number of cycles for a text of the tiny pair."""
    pair = build_tree_pair(verifier, shape)
    params = SamplingParams(**options)
    new = len(text)
    text = Text(torch.tensor([*PROMPT, *text]), len(PROMPT) - 1, 0)
    generator = seeded(0)
    steps = []
    for p, scores, y in run_teacher_forced(spec, text, pair.tree.max_depth, params):
        both = pad(compute_probs(scores, params), (0, 1)), pad(scores.softmax(-1), (0, 1))
        parts = [[x.repeat_interleave(samples, 0) for x in (p, q, y)] for q in both]
        steps.append(tuple(Nodes(*part, generator, 1) for part in parts))
    (r,) = follow_pairs([pair], steps, False)
    r = r.view(new, samples, -1).mean(1)
    return count_cycle_starts((r - pad(r[:, 1:], (0, 1))).numpy()).sum()


@pytest.mark.parametrize(
    "verifier, shape, new",
    [("single", "chain:2", NEW), ("block", "chain:2", NEW), ("rrs", "2x1", 2), ("greedy", "2x1", NEW),
     ("topk", "2x2", NEW), ("spechub", "2x1", 2), ("rrs-wo", "2x1", 2), ("traversal", "levels:1x2", NEW),
     (SURE, "levels:1x2", NEW)],
)  # fmt: skip
def test_tau_is_that_of_the_real_loop(verifier, shape, new):
    """Cycles for each text, weighed by its probability, against all outcomes of decoding. Noise below 0.004.

    Two tokens hold a whole cycle of one level; what later cycles of that shape begin with, `greedy` shows.
    """
    spec = spec_of("eagle", shape, verifier)
    options = {"temperature": 1.0, "top_k": TABLE_VOCAB if shape == "2x2" else 3}  # fewer tokens have fewer outcomes
    texts, wanted = enumerate_decoding(spec, PROMPT, 64, max_new_tokens=new, **options).distribution()
    exact = verifier in ("single", "block", SURE, "rrs", "greedy", "topk")
    options |= {"samples": 1} if exact else {}
    found = sum(prob * cycles_of(verifier, shape, spec, text, **options) for text, prob in texts.items())
    assert abs(found - wanted) < (1e-4 if exact else 0.02)


@torch.no_grad()
def planned_cycles_of(verifier, shape, spec, text, samples):
    """As `cycles_of`, for a tree that is shaped anew after each token."""
    params = SamplingParams(1.0)
    new = len(text)
    text = Text(torch.tensor([*PROMPT, *text]), len(PROMPT) - 1, 0)
    pair = Planned(verifier, shape, load_verifier(verifier).scheme, parse_policy(shape))
    depth = pair.tree.max_depth
    generator = seeded(0)
    steps = []
    for p, scores, y in run_teacher_forced(spec, text, depth, params):
        parts = [x.repeat_interleave(samples, 0) for x in (p, pad(compute_probs(scores, params), (0, 1)), y)]
        steps.append((Nodes(*parts, generator, 1),) * 2)
    trees = pair.plan_trees(list(predict_levels(spec, text, depth, params)), params)
    cycles = follow_planned(pair, [tree for tree in trees for _ in range(samples)], steps)
    r = cycles.kept.view(new, samples, -1).mean(1)
    return count_cycle_starts((r - pad(r[:, 1:], (0, 1))).numpy()).sum()


@pytest.mark.parametrize("kind, verifier, samples", [("medusa", "rrs", 1), ("dspark", "traversal", 100)])
def test_tau_of_trees_shaped_before_their_draws_is_that_of_the_real_loop(kind, verifier, samples):
    shape = "ddtree:nodes=4,depth=2"
    spec = spec_of(kind, shape, verifier)
    texts, wanted = enumerate_decoding(spec, PROMPT, 64, max_new_tokens=2, temperature=1.0).distribution()
    found = sum(prob * planned_cycles_of(verifier, shape, spec, text, samples) for text, prob in texts.items())
    assert abs(found - wanted) < (1e-4 if samples == 1 else 0.02)


@pytest.mark.parametrize("kind, shape", [("eagle", "dynamic:depth=2,topk=2,nodes=4"), ("medusa", "ddtree:nodes=4")])
def test_tau_of_freshly_drafted_trees_is_that_of_the_real_loop(kind, shape):
    spec = spec_of(kind, shape, "topk")
    params = SamplingParams(1.0)
    texts, wanted = enumerate_decoding(spec, PROMPT, 64, max_new_tokens=NEW, temperature=1.0).distribution()
    one = Decoded("topk", shape, parse_policy(shape))
    found = 0.0
    for text, chance in texts.items():
        along = Text(torch.tensor([*PROMPT, *text]), len(PROMPT) - 1, 0)
        cycles = one.decode_cycles(spec, CycleCost((1, 2), (1.0, 1.0)), along, params, 5)
        assert [token for cycle in cycles for piece in cycle.answer for token in piece.token_ids] == [*text]
        found += chance * len(cycles)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_run_keeps_its_texts_and_writes_tables_and_plots(home, tmp_path):
    models = {"target": f"{home}/target", "head": f"{home}/head", "questions": f"{home}/questions.jsonl"}
    models |= {"out": str(tmp_path), "max_new_tokens": 8, "dtype": "float32", "temperature": "1"}
    asked = {"verifier": "rrs,block,traversal,topk", "tree": "chain:2;2x2;dynamic:depth=2,topk=2,nodes=4"}
    config = TauConfig(**models, **asked, batch="1,4", bandwidth=100.0, flops=1.0)
    found = measure_tau(config)
    texts = (tmp_path / "texts-1.json").read_text()
    pairs = [(row["tree"][:7], row["verifier"]) for row in found["rows"]]
    any_width = ("rrs", "traversal", "topk")
    wanted = [*(("chain:2", name) for name in (*any_width, "block")), *(("2x2", name) for name in any_width)]
    assert sorted(pairs) == sorted([*wanted, ("dynamic", "topk")])
    assert all(row["tau"]["value"] >= 1 and set(row["speed"]) == {1, 4} for row in found["rows"])
    draws = {"rrs": "with replacement", "block": "with replacement", "traversal": "without replacement"}
    for row in found["rows"]:
        assert row["draws"] == (None if row["tree"][:7] == "dynamic" else draws.get(row["verifier"], "most likely"))
        if row["draws"]:
            assert row["tau"]["value"] <= row["bound"]["value"] + 1e-9
        else:
            assert row["bound"] is None
    assert "without replacement: traversal" in (tmp_path / "tau.md").read_text()
    assert measure_tau(config)["rows"] == found["rows"]
    assert (tmp_path / "texts-1.json").read_text() == texts
    assert "<polyline" in (tmp_path / "tau.html").read_text()
    for wrong, message in {"typical": "not lossless", "nothing": "unknown verifier"}.items():
        with complains(message):
            measure_tau(TauConfig(**models, verifier=wrong))
    with complains("--bandwidth and --flops"):
        TauConfig(**models, flops=1.0)
    with complains("topk, gumbel and auto are measured"):
        measure_tau(TauConfig(**models, verifier="rrs", tree="dynamic"))
    with complains("model no draft model"):
        own = {name: value for name, value in models.items() if name != "head"}
        drafter = f"model:{home}/target"
        measure_tau(TauConfig(**own, drafter=drafter, verifier="topk", tree="auto", bandwidth=100.0, flops=1.0))
    with complains("both --head and --drafter"):
        TauConfig(**models, drafter="suffix")


def test_drafters_are_measured_on_the_same_texts_as_each_alone(home, tmp_path):
    head = f"eagle:{home}/head"
    shared = {
        "target": f"{home}/target",
        "questions": f"{home}/questions.jsonl",
        "max_new_tokens": 8,
        "dtype": "float32",
    }
    shared |= {
        "temperature": "1",
        "verifier": "topk,rrs",
        "tree": "2x2;dynamic:depth=2,topk=2,nodes=4",
        "bandwidth": 100.0,
    }

    def rows(drafter):
        config = TauConfig(**shared, flops=1.0, drafter=drafter, out=str(tmp_path / str(len(drafter))))
        found = measure_tau(config)["rows"]
        places = [(row["drafter"], row["tree"][:7], row["verifier"]) for row in found]
        return dict(zip(places, [(row["tau"], row["nodes"], row["alpha"]) for row in found], strict=True))

    together = rows(f"{head},suffix,suffix+{head}")
    apart = rows(head) | rows("suffix") | rows(f"suffix+{head}")
    assert together == apart
    assert [place[1:] for place in together] == [
        ("2x2", "topk"), ("2x2", "rrs"), ("dynamic", "topk"), ("its own", "topk"), ("dynamic", "topk")
    ]  # fmt: skip


def simulate(verifier, spec, answers):
    """The totals of a verifier's own answers to the tiny pair's prompt."""
    pair = Simulated(replace(build_tree_pair("block", "chain:2"), verifier=verifier), answers)
    text = Text(torch.tensor([*PROMPT, 0]), len(PROMPT) - 1, 0)
    config = TauConfig(target="tiny", head="tiny", out="out", max_new_tokens=NEW)
    costs = {1: CycleCost((1, 2), (1.0, 1.0)), 2: CycleCost((1, 2), (3.0, 3.0))}
    with torch.no_grad():
        return simulate_totals(text, spec, costs, pair, SamplingParams(1.0), config)


def test_the_cycles_of_own_answers_are_those_of_the_real_loop(monkeypatch):
    """Block verification of the tutorial: its mean is that over all outcomes, within four standard errors."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs" / "examples")
    spec = spec_of("eagle", "chain:2", "block")
    _, wanted = enumerate_decoding(spec, PROMPT, 64, max_new_tokens=NEW, temperature=1.0).distribution()
    answers = 200
    found = simulate("whole:Whole", spec, answers)
    assert found.tokens == answers * NEW
    assert abs(found.cycles[0] / answers - wanted) < 4 * 0.7 / answers**0.5
    assert answers <= found.fewest_cycles < found.cycles[0] + 4 * 0.7 * answers**0.5
    assert found.seconds.tolist() == [found.cycles[0], 3 * found.cycles[0]]


def test_cycles_that_an_answers_end_may_cut_do_not_count():
    assert count_lengths([2, 1, 0, 0], 7, 2).tolist() == [0, 1, 1]
    assert count_lengths([], 0, 2).tolist() == [0, 0, 0]


def test_cycles_end_as_all_ways_to_cut_a_text_do():
    """Five tokens by lengths of at most three: the sum over all beginnings of the products."""
    w = np.random.default_rng(0).random((5, 3))
    wanted = np.zeros(5)
    for cuts in product((False, True), repeat=4):
        places = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        steps = list(pairwise(places))
        if all(b - a <= 3 for a, b in steps):
            wanted[places[-1]] += np.prod([w[a, b - a - 1] for a, b in steps])
    np.testing.assert_allclose(count_cycle_starts(w), wanted)
