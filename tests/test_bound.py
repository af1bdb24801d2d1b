"""No lossless verifier keeps more than the bound, the best one nearly keeps it, and what keeps more is lossy."""

import math
from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import random_law
from equality import seeded
from scipy.optimize import linprog
from test_tau import pair_of

from treespec.eval.acceptance.carried import Nodes
from treespec.eval.acceptance.ways import followed
from treespec.trees.policy import policy


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
    for name in ("bound", "rrs", "kseq", *(["block"] if shape == "chain:2" else [])):
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
