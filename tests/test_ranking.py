"""Ranked trees: what is kept, and that plain Python on a CPU keeps the same as tensors on any device."""

import pytest
import torch
from models import rand, randn, seeded

from treespec.draft.best_tree import CandidateLevel, rank_descending, select_best_on_host, select_best_tree
from treespec.draft.builders import CycleBuilder, select_most_likely_on_host
from treespec.draft.cycle import build_score_params
from treespec.draft.ranking import HostRanking, TopRanking
from treespec.draft.tree_assembly import grow_together
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.mask import build_ancestor_mask, mark_ancestors
from treespec.trees.policy import parse_policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import argsort_descending
from treespec.verify.distributions import select_most_likely
from treespec.verify.topk import TopK

R, A, B, C, D, E, F = range(7)
FIELDS = ("tokens", "parents", "depth", "ancestors")


def test_the_drawing_of_columns_and_the_nodes_that_are_kept():
    """Drawn in `select_best_tree` and `select_best_on_host`: b, c, a are the best candidates."""
    tokens = [torch.tensor([R]), torch.tensor([A, B]), torch.tensor([C, D, E, F])]
    scores = [torch.tensor([0.3, 0.6], dtype=torch.float32), torch.tensor([0.4, 0.2, 0.15, 0.1], dtype=torch.float32)]
    tree = select_best_tree(tokens, [torch.tensor([1, 0])], scores, 4)
    assert tree.tokens.tolist() == [R, B, C, A]
    assert tree.parents.tolist() == [-1, 0, 1, 0]
    assert tree.depth.tolist() == [0, 1, 2, 1]

    first = CandidateLevel([A, B], scores[0].tolist(), [0, 0])
    second = CandidateLevel([C, D, E, F], scores[1].tolist(), [2, 2, 1, 1])
    ranked = select_best_on_host(R, [first, second], 4)
    assert ranked.columns == [0, 2, 3, 1]
    assert ranked.parents == [-1, 0, 1, 0]
    assert all(torch.equal(getattr(ranked.tree, name), getattr(tree, name)) for name in FIELDS)


def random_rows(nodes, tokens, generator, kind):
    """Draft logits [nodes, tokens]: any numbers, a few distinct ones, or some NaN."""
    if kind == "ties":
        return torch.randint(0, 3, (nodes, tokens), generator=generator).float()
    rows = randn(nodes, tokens, generator=generator)
    if kind == "NaN":
        rows[rand(nodes, 1, generator=generator).expand_as(rows) < 0.3] = torch.nan
    return rows


@pytest.mark.parametrize("kind", ["any", "ties", "NaN"])
@pytest.mark.parametrize("seed", range(8))
def test_one_tree_on_a_cpu_is_that_of_a_batch_of_one(kind, seed):
    """`HostRanking` grows one tree in plain Python, `TopRanking` those of a batch with tensors."""
    generator = seeded(seed)
    depth, topk, nodes, tokens = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(4))
    ranking = TopRanking(depth, topk, 3 * nodes, None if seed % 2 else 2)
    root_logits = random_rows(1, 3 * tokens, generator, kind)
    rows = [random_rows(1, 3 * tokens, generator, kind) for _ in range(32)]

    def extend(frontiers):
        (frontier,) = frontiers
        slots = frontier.sibling_slots.flatten().tolist()
        return [torch.cat([rows[slot % len(rows)] for slot in slots])]

    root = torch.tensor([R])
    on_host = HostRanking(ranking.depth, ranking.topk, ranking.nodes, ranking.expanded)
    (ranked,) = grow_together(extend, [on_host.grow(root, root_logits)])
    alone = ranked.tree
    (batched,) = grow_together(extend, [ranking.grow(root[None], root_logits[None])])
    for name in FIELDS:
        assert torch.equal(getattr(alone, name), getattr(batched, name)[0]), name


@pytest.mark.parametrize("kind", ["any", "ties", "NaN"])
def test_python_ranks_as_torch_does(kind):
    for seed in range(20):
        scores = random_rows(1, 40, seeded(seed), kind)[0]
        scores[3::7] = torch.nan if kind == "NaN" else -torch.inf
        assert rank_descending(scores.tolist()) == argsort_descending(scores).tolist()


@pytest.mark.parametrize("kind", ["any", "ties", "NaN"])
@pytest.mark.parametrize("tokens", [3, 63, 64, 1000, 8192])
def test_the_most_likely_token_on_a_cpu_is_that_of_every_device(kind, tokens):
    for seed in range(5):
        rows = random_rows(3, tokens, seeded(seed), kind)
        rows[:, tokens // 2] = torch.nan if kind == "NaN" else rows[:, tokens // 2]
        for width in (1, 2, 5):
            best = select_most_likely_on_host(rows.bfloat16(), width).reshape(3, width)
            assert best.tolist() == select_most_likely(rows.bfloat16(), width).tolist()


def test_ancestors_of_one_tree_are_those_of_a_batch():
    for seed in range(10):
        nodes = torch.arange(1, 20)
        parents = (rand(19, generator=seeded(seed)) * nodes).long()
        parents = torch.cat([torch.tensor([-1]), parents])
        assert torch.equal(mark_ancestors(parents.tolist()), build_ancestor_mask(parents[None])[0])


@pytest.mark.parametrize("kind", ["any", "ties", "NaN"])
@pytest.mark.parametrize("tree", ["chain:3", "3x2", "levels:2x1x2", StaticTree(((1,), (1, 0), (1, 2)))])
@pytest.mark.parametrize("tokens", [2, 5, 100])
def test_a_fixed_tree_on_a_cpu_is_that_of_tensors(kind, tree, tokens):
    """Also if a node has more children than there are tokens."""
    shape = tree if isinstance(tree, StaticTree) else parse_policy(tree)
    root = torch.tensor([R])
    for seed in range(4):
        generator = seeded(seed)
        rows = random_rows(1 + tokens, tokens, generator, kind)

        def extend(frontiers, rows=rows):
            return [rows[frontier.tokens] for frontier in frontiers]

        trees = []
        for on_host in (False, True):
            builder = CycleBuilder(root, rows[-1:], SamplingParams(1.0), generator, TopK(), on_host=on_host)
            trees += grow_together(extend, [builder.grow_fixed(shape)])
        assert all(torch.equal(getattr(trees[0], name), getattr(trees[1], name)) for name in FIELDS)


def test_a_score_at_half_the_temperature_is_as_sure_as_the_heads_own_logits():
    """The figure of `build_score_params`: two tokens with log q -0.4 and -1.2, and no noise."""
    logits = torch.tensor([-0.4, -1.2], dtype=torch.float32)
    own = compute_probs(logits, SamplingParams(1.0))
    for temperature in (0.25, 0.5, 1.0):
        scores = logits / temperature
        params = build_score_params(SamplingParams(temperature))
        assert torch.allclose(compute_probs(scores, params), own, atol=1e-6)
    assert [round(share, 2) for share in own.tolist()] == [0.69, 0.31]
    assert [round(share, 2) for share in (logits / 0.5).softmax(-1).tolist()] == [0.83, 0.17]
    assert build_score_params(SamplingParams(2.0)) == SamplingParams(1.0)
