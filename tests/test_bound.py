"""No lossless verifier keeps more than the bound, and the best one nearly keeps it."""

import math
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


@pytest.mark.parametrize("shape", ["chain:3", "2x2", "levels:1x2x1", "levels:3x1"])
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


@pytest.mark.parametrize("shape", ["chain:2", "2x1", "levels:2x1", "2x2"])
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
