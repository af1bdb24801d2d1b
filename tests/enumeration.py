"""A slow reference for the schemes: every set of draws with its exact probability, in plain Python."""

import itertools

import numpy as np
import torch
from equality import seeded
from scipy.optimize import linprog

from treespec.trees.tree import Draws
from treespec.verify import registry

SCHEMES = registry.SCHEMES
LOSSLESS = [name for name, scheme in SCHEMES.items() if scheme.lossless]
ENUMERABLE = [name for name in LOSSLESS if name != "optimal"]  # its draws carry scores: see test_optimal.py
STOCHASTIC = [name for name, scheme in registry.SCHEMES.items() if not scheme.deterministic]

TABLE = """
plain               | 0.1 0.2 0.3 0.4              | 0.35 0.3 0.25 0.1
p = q               | 0.1 0.2 0.3 0.4              | 0.1 0.2 0.3 0.4
disjoint            | 0.5 0.5 0 0                  | 0 0 0.7 0.3
zeros in p          | 0 0.4 0 0.6                  | 0.3 0.2 0.4 0.1
zeros in q          | 0.3 0.2 0.4 0.1              | 0 0.4 0 0.6
zeros in both       | 0.6 0 0.1 0.3                | 0.2 0.3 0 0.5
one-hot p           | 0 0 1 0                      | 0.4 0.3 0.2 0.1
one-hot q           | 0.4 0.3 0.2 0.1              | 0 1 0 0
one-hot both        | 0 1 0 0                      | 0 0 1 0
one-hot, the same   | 0 0 1 0                      | 0 0 1 0
tiny q              | 0.4 0.3 0.2 0.1              | 0.999999999997 1e-12 2e-12 0
tiny p              | 0.999999999997 1e-12 2e-12 0 | 0.1 0.4 0.2 0.3
tiny both           | 1e-12 0.999999999998 1e-12 0 | 0.999999999998 1e-12 0 1e-12
ties in p/q         | 0.2 0.1 0.4 0.3              | 0.1 0.05 0.55 0.3
ties in q           | 0.5 0.1 0.1 0.3              | 0.25 0.25 0.25 0.25
two ties at the top | 0.1 0.1 0.5 0.3              | 0.1 0.4 0.1 0.4
two supported       | 0.1 0.6 0.2 0.1              | 0.8 0 0 0.2
"""
CASES = {}  # name: p and q of four tokens
for line in TABLE.strip().splitlines():
    name, *laws = line.split("|")
    CASES[name.strip()] = tuple([float(mass) for mass in masses.split()] for masses in laws)


def law(values):
    return torch.tensor(values, dtype=torch.float64)


def random_law(vocabulary, generator):
    """Masses over several orders of magnitude, a fifth of them zero."""
    logits = 2 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    logits[1:][torch.rand(vocabulary - 1, generator=generator) < 0.2] = -torch.inf
    return logits.softmax(-1)


def random_pairs(number, size=5, seed=1):
    generator = seeded(seed)
    return [(random_law(size, generator), random_law(size, generator)) for _ in range(number)]


def every_pair(number, size=5):
    """p and q of every case, and random ones."""
    return [tuple(map(law, case)) for case in CASES.values()] + random_pairs(number, size)


def sequential(q, k):
    """One draw after another, each from q without the earlier ones."""
    total = sum(q)
    if k == 0 or total == 0:
        yield (-1,) * k, 1.0
        return
    for x, mass in enumerate(q):
        rest = [0.0 if y == x else other for y, other in enumerate(q)]
        for draws, probability in sequential(rest, k - 1):
            yield (x, *draws), mass / total * probability


def independent(laws):
    for draws in itertools.product(*(range(len(law)) for law in laws)):
        probability = 1.0
        for x, law in zip(draws, laws, strict=True):
            probability *= law[x]
        yield draws, probability


def tops_then_one(q, k):
    order = sorted(range(len(q)), key=lambda x: -q[x])
    tops = tuple(x for x in order[: k - 1] if q[x] > 0)
    rest = [0.0 if x in tops else mass for x, mass in enumerate(q)]
    for (x,), probability in sequential(rest, 1):
        draws = (*tops, x)
        yield draws + (-1,) * (k - len(draws)), probability


def hub(q, k):
    if k == 1:
        yield from independent([q])
        return
    a = q.index(max(q))
    for i, mass in enumerate(q):
        if i != a:
            yield (i, a), mass
    for (j,), probability in sequential([0.0 if x == a else mass for x, mass in enumerate(q)], 1):
        yield (a, j), q[a] * probability


scheme_by_name = registry.scheme_by_name


def outcomes(name, q, k):
    """The law of k draws that have positive probability. q: [V]."""
    laws = q.tolist()
    match name:
        case "single" | "rrs" | "is-lp" | "kseq":
            found = independent([laws] * k)
        case "rrs-wo":
            found = sequential(laws, k)
        case "greedy":
            found = tops_then_one(laws, k)
        case "spechub":
            found = hub(laws, k)
        case "topk" | "typical":
            found = iter([(tuple(sorted(range(len(laws)), key=lambda x: -laws[x])[:k]), 1.0)])
    return [(draws, probability) for draws, probability in found if probability > 0]


def optimum(found, p):
    """The most that any plan accepts: mass from draws to their own tokens, a linear program (HiGHS, 1e-7)."""
    pairs = [(row, x) for row, (draws, _) in enumerate(found) for x in {*draws} - {-1}]
    uses = np.zeros((len(found) + len(p), len(pairs)))
    for column, (row, x) in enumerate(pairs):
        uses[row, column] = uses[len(found) + x, column] = 1
    supply = [probability for _, probability in found] + p.tolist()
    return -linprog(-np.ones(len(pairs)), A_ub=uses, b_ub=supply, method="highs").fun


def enumerate_plans(scheme, p, q, ks):
    """The law of the output [V] and Pr(it is one of the draws), for each k; all in one batch.

    p, q: [V]. Every plan is checked to be a law.
    """
    width = max(ks)
    laws = [outcomes(scheme.name, q, k) for k in ks]
    tokens = [draws + (-1,) * (width - len(draws)) for found in laws for draws, _ in found]
    draws = torch.tensor(tokens)
    rows = len(tokens)
    sizes = [len(found) for found in laws]
    plan = scheme.plan(p.expand(rows, -1), q.expand(rows, -1), Draws(draws))
    assert plan.dtype == p.dtype
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 1e-12
    drawn = torch.zeros(rows, len(p) + 1).scatter_(1, draws.where(draws >= 0, len(p)), 1.0)[:, :-1]
    results = []
    for found, part, hit in zip(laws, plan.split(sizes), drawn.split(sizes), strict=True):
        weights = torch.tensor([probability for _, probability in found], dtype=p.dtype)
        results.append((weights @ part, weights @ (part * hit).sum(-1)))
    return results
