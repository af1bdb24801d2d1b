"""Exact τ: each scheme's share by draw is its enumeration, and texts end as their cycles do."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from enumeration import every_pair, outcomes, scheme_by_name
from equality import seeded

from treespec.eval.acceptance.carried import FORMS, Nodes, carried
from treespec.eval.acceptance.tau import Pair, ends, lengths
from treespec.trees.static import balanced
from treespec.trees.tree import Draws

# Samples; the standard error of a share is below 0.5 / sqrt(1600), and none may be five of them off.
SAMPLED, NOISE = 1600, 0.065


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


@pytest.mark.parametrize("name", FORMS)
def test_what_a_draw_carries_is_its_enumeration(name):
    scheme = scheme_by_name(name)
    for k, (p, q) in product((1, 2, 3), every_pair(1)[: 1 if name == "optimal" else None]):
        if scheme.max_draws and k > scheme.max_draws:
            continue
        noisy = name in ("spechub", "is-lp", "optimal") or (name, k) == ("rrs-wo", 3)
        size = len(p)
        nodes = Nodes(p.expand(size, -1), q.expand(size, -1), torch.arange(size), seeded(0), SAMPLED if noisy else 1)
        found, wanted = carried(scheme, nodes, k), enumerated(scheme, p, q, k)
        if name in ("greedy", "topk"):  # of equal q either may be drawn
            if len(q.unique()) < size:
                continue
            found, wanted = found.sum(1), wanted.sum(1)
        assert (found - wanted).abs().max() < (NOISE if noisy else 1e-12)


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


def test_a_cycle_is_as_long_as_the_way_along_the_text():
    tree = balanced(2, 2)
    shares = {path: np.array([[0.3, 0.2]]) for path in ((), (0,), (1,))}
    w = lengths(Pair("rrs", "2x2", scheme_by_name("rrs"), tree, dict.fromkeys(shares, 2)), shares)
    np.testing.assert_allclose(w, [[0.5, 0.25, 0.25]])
