"""What the pages call a bound, the best or optimal, beside a linear program over all lossless verifiers of the draws.

A verifier emits, given the drafted tree, a path of it and one token more. It is lossless where for each text y of D + 1
tokens the cycles that emit a prefix z of it, over p(z), add to 1. The program keeps the most that this allows.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from commands import complains
from drafters import build_tree_pair
from models import seeded
from reference import enumerate_plans, every_pair, list_draws, scheme_by_name, to_probs
from scipy.optimize import linprog
from torch.nn.functional import pad

from treespec.eval.acceptance.acceptance_shares import Nodes
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.acceptance.drafted import DRAW_FINDERS, DraftedTexts, count_fewest_cycles
from treespec.eval.acceptance.path_probability import follow_pairs
from treespec.eval.acceptance.tau import count_cycle_starts
from treespec.trees.policy import parse_policy
from treespec.verify.rates import compute_optimal_iid

DRAWN = ("rrs", "rrs-wo", "greedy", "spechub", "topk")  # one verifier of each kind of draws
TAILS = ("optimal", "optimal:threshold=1,extra=0", "optimal:threshold=0,extra=0", "optimal:threshold=0.5,extra=1")
# Without draws that have no node, and without cells: all draws sure but one, some, none.
CLOSED = [f"threshold={share},extra=0,exact=1" for share in (0, 0.4, 1)]
CLOSE = 1e-6  # the program's tolerance


def draws_at(verifier, q, k):
    """{children: probability} of a node, in order, -1 where there is none."""
    scheme = build_tree_pair(verifier, "1x1").scheme
    if scheme.name != "optimal":
        name = "rrs-wo" if verifier == "gumbel" else scheme.name
        return dict(list_draws(name, q, k))
    tops, number, rest = scheme.split_certain_and_random(q[None], torch.tensor([[k]]), k)
    sure = [top for top in tops[0].tolist() if top >= 0]
    rest = (rest[0] / rest[0].sum()).tolist()
    found = {}
    for draws in product([token for token, mass in enumerate(rest) if mass > 0], repeat=int(number)):
        children = tuple([*sure, *dict.fromkeys(draws), *[-1] * k][:k])
        found[children] = found.get(children, 0.0) + math.prod(rest[token] for token in draws)
    return found


def drafted_below(verifier, tree, q, path, text):
    """{texts drafted at and below a node: probability}. Children that repeat a token count together."""
    inner = [child for child in tree.paths if child[:-1] == path and child]
    if not inner:
        return {frozenset([text]): 1.0}
    found = {}
    for tokens, chance in draws_at(verifier, q[text], tree.count_draws(path)).items():
        below = {frozenset([text]): chance}
        for child in inner:
            if tokens[child[-1]] < 0:
                continue
            more = drafted_below(verifier, tree, q, child, (*text, tokens[child[-1]]))
            joined = {}
            for (some, a), (others, b) in product(below.items(), more.items()):
                joined[some | others] = joined.get(some | others, 0.0) + a * b
            below = joined
        for texts, share in below.items():
            found[texts] = found.get(texts, 0.0) + share
    return found


class Tables:
    """p and q after every text of less than D + 1 tokens, of a tree of D levels."""

    def __init__(self, shape, size, seed, make):
        generator = seeded(seed)
        self.shape, self.tree, self.size = shape, parse_policy(shape), size
        self.depth = depth = self.tree.max_depth
        prefixes = [y for n in range(depth + 1) for y in product(range(size), repeat=n)]
        self.p, self.q = ({y: make(size, generator) for y in prefixes} for _ in "pq")
        self.chances = {(): 1.0}
        for y in prefixes:
            for token, mass in enumerate(self.p[y].tolist()):
                self.chances[(*y, token)] = self.chances[y] * mass
        self.texts = [y for y in product(range(size), repeat=depth + 1) if self.chances[y]]

    def best(self, verifier):
        """Tokens that the best lossless verifier of the draws keeps of a tree, on average: the program."""
        drafted = drafted_below(verifier, self.tree, self.q, (), ())
        emitted = [
            (row, (*text, token))
            for row, texts in enumerate(drafted)
            for text in texts
            for token in range(self.size)
            if self.chances[(*text, token)]
        ]
        chances = self.chances
        sums = np.zeros((len(drafted) + len(self.texts), len(emitted)))
        for column, (row, z) in enumerate(emitted):
            sums[row, column] = 1
            sums[len(drafted) :, column] = [(y[: len(z)] == z) * chances[y] / chances[z] for y in self.texts]
        kept = np.array([len(z) - 1 for _, z in emitted])
        return -linprog(-kept, A_eq=sums, b_eq=[*drafted.values(), *(chances[y] for y in self.texts)]).fun

    def measured(self, verifier):
        """Tokens that a verifier keeps on average, and the most that the bound lets any keep."""
        steps = []
        for depth in range(self.depth):
            p, q = (torch.stack([masses[y[:depth]] for y in self.texts]) for masses in (self.p, self.q))
            steps.append((p, q, torch.tensor([y[depth] for y in self.texts])))
        chances = torch.tensor([self.chances[y] for y in self.texts], dtype=torch.float64)
        return tuple(float(chances @ along) for along in kept_along(verifier, self.shape, steps))


def kept_along(verifier, shape, steps):
    """`Tables.measured` of each of n texts. steps: p [n, V], q [n, V] and y [n] of each level."""
    pair = build_tree_pair(verifier, shape)
    levels = [(Nodes(*step, seeded(0), 1),) * 2 for step in steps]
    drafted = DraftedTexts([pair], False)
    for level in levels:
        drafted.add_level(*level)
    (kept,) = follow_pairs([pair], levels, False)
    return kept[:, 1:].sum(1), drafted.limit_kept(pair)[:, 1:].sum(1)


def flat_probs(size, generator):
    return torch.randn(size, generator=generator, dtype=torch.float64).softmax(-1)


def probs_without_a_token(size, generator):
    masses = flat_probs(size, generator)
    masses[torch.randint(size, (), generator=generator)] = 0
    return masses / masses.sum()


def located(verifier, q, y, k):
    """[n, k] Pr(draw i is y) at the same node for n tokens y."""
    scheme = build_tree_pair(verifier, "1x1").scheme
    nodes = Nodes(q.expand(len(y), -1), q.expand(len(y), -1), y, seeded(0), 1)
    return DRAW_FINDERS.get(verifier, DRAW_FINDERS[scheme.name])(nodes, k, scheme)


@pytest.mark.parametrize("verifier", [*DRAWN, "gumbel", *TAILS])
def test_where_a_draw_lies_is_its_enumeration(verifier):
    for k, (_, q) in product((1, 2, 3), every_pair(3)):
        if len(q.unique()) < len(q) and verifier not in ("rrs", "rrs-wo", "gumbel"):  # of equals either may be sure
            continue
        if k > 2 and verifier in ("spechub", TAILS[3]):  # the last draws too often for an enumeration
            continue
        wanted = torch.zeros(len(q), k, dtype=torch.float64)
        for tokens, chance in draws_at(verifier, q, k).items():
            for i, token in enumerate(tokens):
                if token >= 0:
                    wanted[token, i] += chance
        torch.testing.assert_close(located(verifier, q, torch.arange(len(q)), k), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_draws_of_a_large_vocabulary_lie_where_sums_say(power):
    """Masses r^-power of 1,000 tokens: the second and third draw without replacement as sums over those before."""
    q = torch.arange(1, 1001, dtype=torch.float64) ** -power
    q = q / q.sum()
    y = torch.tensor([0, 1, 20, 400, 999])
    found = located("rrs-wo", q, y, 3)
    others = q.expand(len(y), -1).scatter(1, y[:, None], 0)
    second = q[y] * (others / (1 - q)).sum(1)
    left = 1 - q[:, None] - q
    left[range(1000), range(1000)] = torch.inf
    third = torch.stack([q[at] * ((row / (1 - q)) @ (1 / left) @ row) for at, row in zip(y, others, strict=True)])
    torch.testing.assert_close(found, torch.stack([q[y], second, third], 1), rtol=1e-8, atol=0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_distinct_draws_of_a_large_vocabulary_lie_where_sums_say(power):
    """Four independent draws of 1,000 tokens have a fourth distinct one where none repeats; in all they have y."""
    q = torch.arange(1, 1001, dtype=torch.float64) ** -power
    q = q / q.sum()
    y = torch.arange(1000)
    found = located("optimal:threshold=1,extra=0", q, y, 4)
    torch.testing.assert_close(found.sum(1), -torch.expm1(4 * torch.log1p(-q)), rtol=1e-9, atol=0)
    sums = [float((q**n).sum()) for n in range(5)]
    none_repeats = 1 - 6 * sums[2] + 8 * sums[3] + 3 * sums[2] ** 2 - 6 * sums[4]
    torch.testing.assert_close(found[:, 0], q, rtol=1e-12, atol=0)
    assert float(found[:, 3].sum()) == pytest.approx(none_repeats, rel=1e-9)


@pytest.mark.parametrize("shape", ["chain:2", "2x1", "3x1", "levels:2x1", "levels:1x2", "2x2"])
@pytest.mark.parametrize("verifier", [*DRAWN, "gumbel", *TAILS[:3]])
def test_no_lossless_verifier_keeps_more_than_the_bound_of_its_draws(verifier, shape):
    if verifier == "spechub" and shape == "3x1":
        return
    for seed in (1, 2):
        tables = Tables(shape, 3, seed, flat_probs if seed == 1 else probs_without_a_token)
        best = tables.best(verifier)
        (_, limit) = tables.measured(verifier)
        assert best <= limit * (1 + CLOSE)
        if shape == "chain:2" or verifier == "topk":
            assert best == pytest.approx(limit, rel=CLOSE)


@pytest.mark.parametrize("shape", ["2x1", "levels:2x1", "2x2"])
@pytest.mark.parametrize("verifier", ["rrs", "kseq", "greedy", "topk", *(f"block-optimal:{how}" for how in CLOSED)])
def test_no_verifier_keeps_more_than_the_best_of_its_draws(verifier, shape):
    tables = Tables(shape, 3, 1, flat_probs)
    assert tables.measured(verifier)[0] <= tables.best(verifier) * (1 + CLOSE)


@pytest.mark.parametrize("verifier", ["greedy", "topk", *(f"optimal:{how}" for how in CLOSED)])
def test_at_one_node_the_optimal_ones_are_the_best_of_their_draws(verifier):
    for shape, seed in product(("1x1", "2x1", "3x1"), range(2)):
        tables = Tables(shape, 4, seed, flat_probs)
        assert tables.measured(verifier)[0] == pytest.approx(tables.best(verifier), rel=CLOSE)


@pytest.mark.parametrize("shape", ["chain:2", "chain:3"])
@pytest.mark.parametrize("verifier", ["block", "traversal", *(f"block-optimal:{how}" for how in CLOSED)])
def test_of_one_path_no_lossless_verifier_keeps_more_than_block_verification(verifier, shape):
    for seed in range(2):
        tables = Tables(shape, 3 if shape == "chain:2" else 2, seed, flat_probs)
        kept, limit = tables.measured(verifier)
        assert kept == pytest.approx(tables.best(verifier), rel=CLOSE)
        assert kept == pytest.approx(limit, rel=CLOSE)


@pytest.mark.parametrize("how", CLOSED)
def test_block_optimal_is_optimal_where_only_the_last_level_branches(how):
    for (shape, size), seed in product((("2x1", 4), ("levels:1x2", 3), ("levels:1x1x2", 2)), range(2)):
        tables = Tables(shape, size, seed, flat_probs)
        assert tables.measured(f"block-optimal:{how}")[0] == pytest.approx(tables.best(f"optimal:{how}"), rel=CLOSE)


@pytest.mark.parametrize("shape, most", [("2x2", 0.048), ("levels:2x1", 0.022)])
def test_where_branches_come_first_other_verifiers_keep_more_than_block_optimal(shape, most):
    """In tokens a cycle, the last one included; of the draws all but one are sure."""
    short = list[float]()
    for seed in range(12):
        tables = Tables(shape, 3, seed, flat_probs)
        kept = tables.measured(f"block-optimal:{CLOSED[0]}")[0]
        short.append((1 + tables.best(f"optimal:{CLOSED[0]}")) / (1 + kept) - 1)
    assert min(short) >= -CLOSE
    assert max(short) == pytest.approx(most, abs=0.001)


def test_at_a_node_draws_without_replacement_may_keep_more_than_block_optimal():
    p = to_probs([0, 0, 0.5, 0.5])
    q = to_probs([0.4, 0.3, 0.2, 0.1])
    [(_, in_turn)] = enumerate_plans(scheme_by_name("rrs-wo"), p, q, [2])
    y = torch.tensor([2, 3])
    kept = p[y] @ kept_along("block-optimal:exact=1", "2x1", [(p.expand(2, -1), q.expand(2, -1), y)])[0]
    assert (in_turn.item(), kept.item()) == pytest.approx((0.6286, 0.5), abs=1e-4)


def test_likely_tokens_may_keep_more_than_any_verifier_of_draws_without_replacement():
    """12 tokens, 0.9 of p and 0.5 of q on the first of them, at each of three nodes: tokens a cycle."""
    p, q = (pad(torch.full((11,), (1 - top) / 11, dtype=torch.float64), (1, 0), value=top) for top in (0.9, 0.5))

    def tokens(verifier):
        texts = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # the eleven others are alike
        chances = torch.tensor([0.9, 0.1], dtype=torch.float64)[texts].prod(1)
        found = kept_along(verifier, "2x2", [(p.expand(4, -1), q.expand(4, -1), y) for y in texts.T])
        return [1 + float(chances @ along) for along in found]

    assert tokens("greedy") == pytest.approx([3, 3])
    assert tokens("block-optimal") == pytest.approx([3, 3])
    assert tokens("rrs-wo")[1] == pytest.approx(2.6186, abs=1e-4)
    assert tokens("rrs")[1] == pytest.approx(2.6344, abs=1e-4)


def test_at_a_node_the_bound_may_be_above_the_optimum():
    """Two draws of 1,000 equally likely tokens; the target gives probability to 500 of them."""
    q = torch.full((1000,), 1e-3, dtype=torch.float64)
    p = torch.where(torch.arange(1000) < 500, 2e-3, 0.0).double()
    y = torch.arange(500)
    limit = p[y] @ kept_along("rrs", "2x1", [(p.expand(500, -1), q.expand(500, -1), y)])[1]
    assert limit.item() == pytest.approx(1, abs=1e-3)
    assert compute_optimal_iid(p[None], q[None], 2).item() == pytest.approx(0.75)


def test_the_fewest_cycles_are_those_of_the_best_way_to_keep_fewer():
    """Four places, at most two tokens: of all ways to choose j <= i tokens where i could be kept."""
    limits = np.sort(np.random.default_rng(1).random((4, 3)), 1)[:, ::-1].copy()
    limits[:, 0] = limits[1] = 1
    limits[2, 1:] = 0  # nothing is drafted behind the second token, all behind the first: better to keep none before
    shares = limits - np.pad(limits[:, 1:], ((0, 0), (0, 1)))
    found = list[float]()
    for ways in product(product((0,), (0, 1), (0, 1, 2)), repeat=4):
        w = np.zeros((4, 3))
        for place, way in enumerate(ways):
            for i, j in enumerate(way):
                w[place, j] += shares[place, i]
        found.append(count_cycle_starts(w).sum())
    assert count_fewest_cycles(limits) == pytest.approx(min(found))
    assert min(found) < count_cycle_starts(shares).sum()


@pytest.mark.parametrize("name, beside", [("bound", "rrs"), ("bound-wo", "rrs-wo")])
def test_the_former_names_of_bounds_say_where_they_are(name, beside, tmp_path):
    config = TauConfig(out=str(tmp_path), target="t", head="h", verifier=f"topk,{name}")
    with complains(f"Bound of its draws.*beside {beside}"):
        assert config.verifiers
