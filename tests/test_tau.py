"""Exact τ: each share and each way is its enumeration, τ is that of the real loop, and texts end as their cycles do."""

import math
from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from enumeration import every_pair, outcomes, random_law, scheme_by_name
from equality import seeded
from oracle import outcomes as decoded
from refusals import complains
from scipy.optimize import linprog
from tiny_pairs import NEW, PROMPT, spec_of
from torch.nn.functional import pad

from treespec.draft.cost.model import Cost
from treespec.eval.acceptance.carried import FORMS, Nodes
from treespec.eval.acceptance.config import DRAWN_BY, TauConfig
from treespec.eval.acceptance.decoded import Decoded
from treespec.eval.acceptance.tau import along_text, ends, measure
from treespec.eval.acceptance.ways import Pair, followed
from treespec.eval.texts import Text
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.policy import policy
from treespec.trees.tree import Draws

# Samples; the standard error of a share is below 0.5 / sqrt(1600), and none may be five of them off.
SAMPLED, NOISE = 1600, 0.065
RACES = ("gumbel", "gls")


def first(tokens, y, k):
    drawn = tokens[:, :k] == y
    return drawn & (drawn.cumsum(1) == 1)


def enumerated(scheme, p, q, k):
    """[V, k] Pr(the output is y, and draw i is the first of y), from all draws; of scores from many samples."""
    if scheme.name == "optimal":
        draws = scheme.draw(q.expand(4 * SAMPLED, -1), k, seeded(1))
        tokens, chance = draws.tokens, torch.full((4 * SAMPLED,), 1 / (4 * SAMPLED), dtype=torch.float64)
    else:
        found = outcomes(scheme.name, q, k)
        tokens, chance = torch.tensor([d for d, _ in found]), torch.tensor([c for _, c in found], dtype=torch.float64)
        draws = Draws(tokens)
    plan = scheme.plan(p.expand(len(tokens), -1), q.expand(len(tokens), -1), draws) * chance[:, None]
    return torch.stack([(first(tokens, y, k) * plan[:, y : y + 1]).sum(0) for y in range(len(p))])


def raced(name, p, q, k):
    """`enumerated` of verifiers over noise, by sampling the noise."""
    times = torch.empty(4 * SAMPLED, 1 if name == "gumbel" else k, len(p), dtype=torch.float64)
    times.exponential_(generator=seeded(2))
    output = (times.amin(1) / p).argmin(-1)
    tokens = (times[:, 0] / q).topk(k, largest=False).indices if name == "gumbel" else (times / q).argmin(-1)
    tokens = tokens.masked_fill(q[tokens] == 0, -1)
    shares = [(first(tokens, y, k) & (output == y)[:, None]).double().mean(0) for y in range(len(p))]
    return torch.stack(shares)


@pytest.mark.parametrize("name", FORMS)
def test_what_a_draw_carries_is_its_enumeration(name):
    scheme = scheme_by_name(DRAWN_BY.get(name, name))
    for k, (p, q) in product((1, 2, 3), every_pair(1)[: 1 if name == "optimal" else None]):
        if scheme.max_draws and k > scheme.max_draws:
            continue
        noisy = name in ("spechub", "is-lp", "optimal", *RACES) or (name == "rrs-wo" and k > 1)
        size = len(p)
        nodes = Nodes(p.expand(size, -1), q.expand(size, -1), torch.arange(size), seeded(0), 1)
        many = Nodes(*(x.repeat_interleave(SAMPLED, 0) for x in (nodes.p, nodes.q, nodes.y)), seeded(0), 1)
        found = FORMS[name](many if noisy else nodes, k, scheme)
        found = found.view(size, -1, k).mean(1)
        wanted = raced(name, p, q, k) if name in RACES else enumerated(scheme, p, q, k)
        if name in ("greedy", "topk") and len(q.unique()) < size:  # of equal q either may be drawn
            continue
        if name in ("greedy", "topk", "is-lp", "optimal"):  # the split of these is by few samples
            assert (found.sum(1) - wanted.sum(1)).abs().max() < (NOISE if noisy else 1e-12)
        else:
            assert (found - wanted).abs().max() < (NOISE if noisy else 1e-12)


def pair_of(verifier, shape):
    tree = policy(shape)
    inner = {path[:-1] for path in tree.paths[1:]}
    scheme = scheme_by_name(DRAWN_BY.get(verifier, verifier))
    return Pair(verifier, shape, scheme, tree, {path: tree.draws(path) for path in inner})


@torch.no_grad()
def cycles_of(verifier, shape, spec, text, samples=400):
    """The mean number of cycles for a text of the tiny pair."""
    pair, params = pair_of(verifier, shape), SamplingParams(1.0)
    text, generator = Text(torch.tensor([*PROMPT, *text]), len(PROMPT) - 1, 0), seeded(0)
    steps = []
    for p, scores, y in along_text(spec, text, pair.tree.max_depth, params):
        both = pad(probs(scores, params), (0, 1)), pad(scores.softmax(-1), (0, 1))
        parts = [[x.repeat_interleave(samples, 0) for x in (p, q, y)] for q in both]
        steps.append(tuple(Nodes(*part, generator, 1) for part in parts))
    (r,) = followed([pair], steps, False)
    r = r.view(NEW, samples, -1).mean(1)
    return ends((r - pad(r[:, 1:], (0, 1))).numpy()).sum()


@pytest.mark.parametrize(
    "verifier, shape",
    [("single", "chain:2"), ("block", "chain:2"), ("rrs", "2x1"), ("kseq", "2x1"), ("greedy", "2x1"), ("topk", "2x2"),
     ("is-lp", "2x1"), ("spechub", "2x1"), ("rrs-wo", "2x1"), ("traversal", "delayed:1x2x1"), ("gbv", "2x1"),
     ("gbv", "delayed:1x2x1")],
)  # fmt: skip
def test_tau_is_that_of_the_real_loop(verifier, shape):
    """Cycles for each text, weighed by its probability, against all outcomes of decoding. Noise below 0.004."""
    spec = spec_of("eagle", shape, verifier)
    texts, wanted = decoded(spec, PROMPT, 64, max_new_tokens=NEW, temperature=1.0).distribution()
    exact = verifier in ("single", "block", "gbv", "rrs", "kseq", "greedy", "topk")
    samples = {"samples": 1} if exact else {}
    found = sum(prob * cycles_of(verifier, shape, spec, text, **samples) for text, prob in texts.items())
    assert abs(found - wanted) < (1e-4 if exact else 0.02)


@pytest.mark.parametrize("shape", ["chain:3", "2x2", "delayed:1x2x2", "delayed:0x3x2"])
def test_no_verifier_keeps_more_than_the_bound(shape):
    """At random distributions along a text; a chain's block verification attains it."""
    steps, generator = [], seeded(3)
    for _ in range(policy(shape).max_depth):
        p, q = (torch.stack([random_law(6, generator) for _ in range(40)]).repeat_interleave(200, 0) for _ in "pq")
        y = torch.multinomial(p, 1, generator=generator)[:, 0].view(40, 200)[:, :1].expand(-1, 200).flatten()
        steps.append((Nodes(p, q, y, seeded(4), 1),) * 2)
    chain = policy(shape).max_draws == 1
    names = ["rrs", "kseq", "bound", "rrs-wo", "traversal", "bound-wo", *(["block"] if chain else [])]
    r = dict(zip(names, followed([pair_of(name, shape) for name in names], steps, False), strict=True))
    r = {name: own.view(40, 200, -1).mean(1) for name, own in r.items()}
    for name in ("rrs", "kseq"):
        assert (r[name] <= r["bound"] + 1e-9).all()
    for name in ("rrs-wo", "traversal"):
        assert (r[name].mean(0) <= r["bound-wo"].mean(0) + 0.02).all()
    if chain:
        torch.testing.assert_close(r["block"], r["bound"])


@pytest.mark.parametrize("shape", ["chain:2", "2x1", "delayed:0x2x2", "2x2"])
def test_the_bound_is_near_the_best_of_all_verifiers(shape):
    """A linear program over all that a cycle may emit given its draws: a drafted path and one token more.

    A text y of three tokens keeps its probability where the cycles that emit a prefix z of it, over p(z), add to 1.
    """
    tree, size, generator = policy(shape), 2, seeded(11)
    depth, paths = tree.max_depth, tree.paths[1:]
    prefixes = [y for n in range(depth + 1) for y in product(range(size), repeat=n)]
    p, q = ({y: (torch.randn(size, generator=generator).double()).softmax(-1) for y in prefixes} for _ in "pq")
    texts = [*product(range(size), repeat=depth + 1)]

    def joint(y):
        return math.prod(float(p[y[:i]][y[i]]) for i in range(len(y)))

    # 1. All draws, and what may be emitted.
    drawn, emitted = [], []
    for number, tokens in enumerate(product(range(size), repeat=len(paths))):
        named = {(): ()}
        for path, token in zip(paths, tokens, strict=True):
            named[path] = (*named[path[:-1]], token)
        drawn.append(math.prod(float(q[y[:-1]][y[-1]]) for y in list(named.values())[1:]))
        reached = {(): ()}  # of equal draws at a node the first goes on
        for path in paths:
            if path[:-1] in reached and named[path] not in reached.values():
                reached[path] = named[path]
        emitted += [(number, (*y, token)) for y in reached.values() for token in range(size)]

    # 2. The best verifier, the bound, and what others keep.
    sums = np.zeros((len(drawn) + len(texts), len(emitted)))
    for column, (number, z) in enumerate(emitted):
        sums[number, column] = 1
        sums[len(drawn) :, column] = [(y[: len(z)] == z) / joint(z) for y in texts]
    kept = [len(z) - 1 for _, z in emitted]
    best = -linprog(-np.array(kept), A_eq=sums, b_eq=[*drawn, *np.ones(len(texts))], bounds=(0, 1)).fun
    found = {}
    for name in ("bound", "gbv", "rrs", "kseq", *(["block"] if shape == "chain:2" else [])):
        found[name] = 0.0
        for y in texts:
            rows = [(*(x[y[:d]][None] for x in (p, q)), torch.tensor([y[d]]), seeded(0), 1) for d in range(depth)]
            (r,) = followed([pair_of(name, shape)], [(Nodes(*row), Nodes(*row)) for row in rows], False)
            found[name] += joint(y) * float(r[0, 1:].sum())
    bound = found.pop("bound")
    assert max(found.values()) - 1e-9 <= best <= bound + 1e-9
    assert best == pytest.approx(bound, rel=1e-6 if shape in ("chain:2", "2x1") else 0.02)
    if shape == "chain:2":
        assert found["block"] == pytest.approx(best)


def test_hsd_as_released_keeps_more_than_the_bound_and_changes_the_distribution():
    """Hierarchical Speculative Decoding (2601.05724), by the rule of its repository (algorithm_clean.py).

    The whole draft is kept with min(1, P/Q) of its tokens. Refused, one goes back from its end. At t one stops with the
    mass D+ of (min(P, Q) p - Q q)+ over the larger of D+ and D-, or surely where P/Q up to t is 1 or more; the next
    token comes from that difference.
    """
    size, length, generator = 3, 2, seeded(5)
    places = [y for n in range(3) for y in product(range(size), repeat=n)]
    p, q = ({y: torch.randn(size, generator=generator).double().softmax(0).numpy() for y in places} for _ in "pq")
    found, block = defaultdict(float), 0.0  # Pr(a cycle emits a text), tokens kept by block verification

    def joint(table, y):
        return math.prod(table[y[:i]][y[i]] for i in range(len(y)))

    for x in product(range(size), repeat=length):
        left, w = joint(q, x), 1.0
        for t in range(length):
            w = min(1.0, w * p[x[:t]][x[t]] / q[x[:t]][x[t]])
            block += left * w
        for t in reversed(range(length + 1)):
            head, most = x[:t], min(joint(p, x[:t]), joint(q, x[:t]))
            if t == length:
                here, after = most, p[x]
            else:
                difference = most * p[head] - joint(q, head) * q[head]
                after, less = difference.clip(0), (-difference).clip(0)
                sure = joint(p, x[: t + 1]) >= joint(q, x[: t + 1])
                here = left * (1.0 if sure else after.sum() / max(after.sum(), less.sum()))
            left -= here
            for z in range(size) if after.sum() else ():
                found[*head, z] += here * after[z] / after.sum()
            if not after.sum():
                found[x[: t + 1]] += here
    whole = defaultdict(float)
    for y, mass in found.items():  # the target goes on
        for rest in product(range(size), repeat=length + 1 - len(y)):
            whole[y + rest] += mass * joint(p, y + rest) / joint(p, y)
    assert sum(whole.values()) == pytest.approx(1)
    assert max(abs(mass - joint(p, y)) for y, mass in whole.items()) > 0.02
    assert sum(len(y) * mass for y, mass in found.items()) > 1 + block


def test_trees_that_are_drafted_anew_follow_the_text():
    """The cycles of `topk` along a text cut it where no child is its next token, whatever the generator draws."""
    spec = spec_of("eagle", "2x2", "topk")
    text = Text(torch.tensor([*PROMPT, 2, 1, 3]), len(PROMPT) - 1, 0)
    fixed = cycles_of("topk", "2x2", spec, [2, 1, 3], samples=1)
    again = Decoded("topk", "2x2", policy("2x2")).cycles(spec, Cost((1, 2), (1.0, 1.0)), text, SamplingParams(1.0), 5)
    assert len(again) == round(float(fixed))
    assert [token for cycle in again for piece in cycle.answer for token in piece.token_ids] == [2, 1, 3]


def test_a_run_keeps_its_texts_and_writes_tables_and_plots(home, tmp_path):
    models = {"target": f"{home}/target", "head": f"{home}/head", "questions": f"{home}/questions.jsonl"}
    models |= {"out": str(tmp_path), "max_new_tokens": 8, "dtype": "float32", "temperature": "1"}
    asked = {"verifier": "rrs,block,traversal,topk,bound", "tree": "chain:2;2x2;dynamic:depth=2,topk=2,nodes=4"}
    config = TauConfig(**models, **asked, batch="1,4", bandwidth=100.0, flops=1.0)
    found, texts = measure(config), (tmp_path / "texts-1.json").read_text()
    pairs = [(row["tree"][:7], row["verifier"]) for row in found["rows"]]
    any_width = ("rrs", "traversal", "topk", "bound")
    wanted = [*(("chain:2", name) for name in (*any_width, "block")), *(("2x2", name) for name in any_width)]
    assert sorted(pairs) == sorted([*wanted, ("dynamic", "topk")])
    assert all(row["tau"]["value"] >= 1 and set(row["speed"]) == {1, 4} for row in found["rows"])
    assert measure(config)["rows"] == found["rows"]
    assert (tmp_path / "texts-1.json").read_text() == texts
    assert "<polyline" in (tmp_path / "tau.html").read_text()
    for wrong, message in {"typical": "not lossless", "nothing": "unknown verifier"}.items():
        with complains(message):
            measure(TauConfig(**models, verifier=wrong))
    with complains("--bandwidth and --flops"):
        TauConfig(**models, flops=1.0)
    with complains("topk, gumbel and auto are measured"):
        measure(TauConfig(**models, verifier="rrs", tree="sampled"))
    with complains("both --head and --drafter"):
        TauConfig(**models, drafter="lookup")


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
        found = measure(config)["rows"]
        places = [(row["drafter"], row["tree"][:7], row["verifier"]) for row in found]
        return dict(zip(places, [(row["tau"], row["nodes"], row["alpha"]) for row in found], strict=True))

    together = rows(f"{head},lookup,suffix+{head}")
    apart = rows(head) | rows("lookup") | rows(f"suffix+{head}")
    assert together == apart
    assert [place[1:] for place in together] == [
        ("2x2", "topk"), ("2x2", "rrs"), ("dynamic", "topk"), ("its own", "topk"), ("dynamic", "topk")
    ]  # fmt: skip


def test_cycles_end_as_all_ways_to_cut_a_text_do():
    """Five tokens by lengths of at most three: the sum over all beginnings of the products."""
    w = np.random.default_rng(0).random((5, 3))
    wanted = np.zeros(5)
    for cuts in product((False, True), repeat=4):
        places = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        steps = list(pairwise(places))
        if all(b - a <= 3 for a, b in steps):
            wanted[places[-1]] += np.prod([w[a, b - a - 1] for a, b in steps])
    np.testing.assert_allclose(ends(w), wanted)
