"""What pays by the cost model: auto trees, the part of a given tree, or no draft; and the text is the target's."""

from itertools import product

import numpy as np
import pytest
import torch
from commands import complains
from drafters import linear_cost, source_of, suffix_cache
from models import TableConfig, TableModel, random_head, target

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.draft.auto.builder import AutoBuilder, count_expansions, plan_tree
from treespec.draft.auto.cost import find_best_size
from treespec.draft.auto.cost_model import CostModel, limit_sum
from treespec.draft.calibration import Calibration
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.lookup.matches import merge_continuations
from treespec.draft.lookup.one_hot import keep_profitable_nodes
from treespec.draft.pairing import check_fit
from treespec.draft.source import DraftSource
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.sampling.params import SamplingParams
from treespec.trees.dynamic import AutoTree
from treespec.trees.most_likely import estimate_length
from treespec.verify.registry import SCHEMES
from treespec.verify.topk import TopK

RATES = {"1": (0.5, 0.2, 0.1)}
CALIBRATION = Calibration((0.1, 0.8, -1, 0), RATES)
NEW = 60


def table_spec(verifier="auto", cost=None, **options):
    """A table of 8 tokens and a random head, drafting by the cost model."""
    model = Target(TableModel(TableConfig(8, seed=1)))
    return Spec(model, random_head(model, seed=2), "auto", verifier, times=cost or linear_cost(), **options)


def test_the_best_size_at_its_own_rate_maximises_tokens_a_second():
    """Dinkelbach's iteration against every size, for 50 random reaches and costs."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        reach = np.sort(generator.random(30))[::-1]
        forward = 0.01 + 0.01 * generator.random(31).cumsum()
        ratios = np.concatenate([[1], 1 + reach.cumsum()]) / forward
        rate = float(ratios[0])
        for _ in range(20):
            size = find_best_size(reach, forward, rate)
            rate = float(ratios[size - 1])
        assert rate == pytest.approx(float(ratios.max()))


def first_children(parents):
    """The path from the root by first children."""
    path = []
    node = 0
    while node in parents:
        node = parents.index(node)
        path.append(node)
    return path


def test_a_text_whose_first_children_are_all_accepted_gets_the_deepest_chain():
    """Chances of other children take nothing from the first's, however high both were before."""
    model = CostModel(linear_cost(1e-4, 1e-3), (0.88, 0.1, 0.05))
    tree = AutoTree()
    for _ in range(60):
        model.predict(plan_tree(model, tree).prediction, model.rate_correction)
        model.update(first_children(model.prediction.parents))
    shape = plan_tree(model, tree).tree
    assert shape.max_depth == tree.depth
    assert shape.size <= tree.depth + 3


def grown(node, step, temperature=0.0):
    """Mean nodes and levels of the trees of one text."""
    spec = table_spec(cost=linear_cost(node, step), calibration=CALIBRATION)
    stats = spec.generate([1, 2], temperature=temperature, max_new_tokens=200, seed=0).stats
    return sum(stats.drafted) / stats.cycles, len(stats.drafted)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_dearer_nodes_give_smaller_trees_and_dearer_steps_shallower_ones(temperature):
    cheap = grown(1e-5, 1e-5, temperature)
    dear = grown(3e-3, 1e-5, temperature)
    assert dear[0] < cheap[0] / 2
    assert grown(1e-5, 3e-2, temperature)[1] < cheap[1]
    assert grown(1e-5, 1.0, temperature)[1] <= 1


def test_the_planned_shape_is_one_of_few_and_nearly_the_fastest():
    """For 121 corrections of first children by 0.37 to 1.5: at most 12 trees, within 5 % of the best speed."""
    cost = linear_cost(5e-4, 1e-3)
    rates = (0.7, 0.1, 0.05)
    tree = AutoTree(nodes=20, depth=5)
    model = CostModel(cost, rates)
    met = set()
    for firsts in product(np.exp(np.linspace(-1, 0.4, 11)), repeat=2):
        model.rate_correction.factors = np.array([firsts, (1.0, 1.0)]).T.tolist()
        found = plan_tree(model, tree)
        shape = found.tree
        scaled = np.array([rates, rates]) * np.array([firsts, (1, 1), (1, 1)]).T
        corrected = np.array([limit_sum(row) for row in scaled.tolist()])
        expected = estimate_length(shape, corrected[[0, *[1] * 4]].tolist())
        inner = len({path[:-1] for path in shape.paths[1:]})
        assert found.speed == pytest.approx(expected / cost.predict_cycle(shape.size, shape.max_depth, inner), rel=0.1)
        assert found.speed > 0.95 * cost.find_best_tree(corrected, tree.nodes, tree.depth)[1]
        met.add(shape)
    assert len(met) <= 12


def test_the_drawing_of_what_is_expanded():
    """Of nodes reached by .8 and .2, at .7 for a child, .1 for a node and .2 for a level."""
    reach = [0.8, 0.2]
    assert count_expansions(reach, 0.7, price=0.1, step=0.2, row=0.0, levels=1) == 2
    assert count_expansions(reach, 0.7, price=0.15, step=0.2, row=0.0, levels=1) == 1
    assert count_expansions(reach, 0.7, price=0.1, step=0.5, row=0.0, levels=1) == 0
    assert count_expansions(reach, 0.7, price=0.1, step=0.4, row=0.0, levels=2) == 2


def test_expansions_are_the_best_of_all_counts_and_levels():
    """Against the sums of all of them; of equal ones the first."""
    random = np.random.default_rng(0)
    for _ in range(300):
        count, levels = random.integers(1, 11), int(random.integers(1, 8))
        reach = np.sort(random.random(count))[::-1]
        rate, price, step, row = random.random(4) * (1, 0.3, 0.5, 0.1)
        gain = np.maximum(reach[:, None] * rate ** np.arange(1, levels + 1) - price, 0) - row
        gain[0] += row - step
        worth = gain.cumsum(1).cumsum(0)
        best = worth.argmax() // levels + 1 if worth.max() > 0 else 0
        assert count_expansions(reach, rate, price, step, row, levels) == best


@pytest.mark.parametrize("verifier", ["auto", "topk"])
def test_the_same_seed_gives_the_same_text_whatever_was_said_before(verifier):
    spec = table_spec(verifier, calibration=CALIBRATION)
    one, _, again = (spec.generate([1, 2], temperature=1, max_new_tokens=60, seed=seed) for seed in (0, 1, 0))
    assert one.token_ids == again.token_ids
    assert one.stats.accepted == again.stats.accepted


@pytest.mark.parametrize("name", SCHEMES)
def test_an_auto_tree_takes_no_draws_and_needs_no_calibration(name):
    if SCHEMES[name].deterministic:
        spec = table_spec(name, allow_lossy=True)
        assert len(spec.generate([1, 2], temperature=1, max_new_tokens=8, seed=0).token_ids) == 8
    else:
        with complains("biases sampled draws"):
            check_fit(AutoTree(), SCHEMES[name])


def free_alone_dear_together(texts):
    """Alone a node costs nothing; together each costs as much as the forward. The levels cost nothing."""
    return linear_cost(node=1e-7 if texts == 1 else 1e-2, step=1e-7)


@pytest.mark.parametrize("name", ["head", "suffix"])
def test_drafting_stops_where_it_costs_more_and_resumes_in_smaller_batches(name):
    """Of two texts one ends early: while both run hardly a node is drafted, then many are."""
    model = target("llama")
    source = random_head(model) if name == "head" else source_of("suffix:tokens=0,percent=1", model)
    tree = "auto" if name == "head" else None
    spec = Spec(model, source, tree, times=free_alone_dear_together)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    wanted = spec.baseline().generate(prompt, max_new_tokens=NEW).token_ids
    texts = [spec.request(prompt, max_new_tokens=most) for most in (NEW, NEW // 2)]
    for _ in spec.decoder.run(texts, batch=2):
        pass
    long, short = (text.stats for text in texts)
    assert long.new_tokens == len(wanted)
    assert sum(short.drafted) <= 0.3 * short.cycles
    assert sum(long.drafted) > long.cycles - short.cycles
    assert texts[0].committed[len(prompt) :] == wanted[:-1]


def build_hopeless_spec(tree):
    """A random head and the text beside it, where every node costs as much as a token."""
    model = target("llama")
    head = EagleProposer(random_head(model), model)
    source = DraftSource(head, suffix_cache())
    cost = linear_cost(node=0.009)
    return Spec(model, source, tree, "gumbel", times=cost.select_batch_size)


@pytest.mark.parametrize("texts, tree, shares", [(3, "auto", (0.1, 0.4)), (1, "auto", (1, 1)), (3, "2x1", (1, 1))])
def test_a_batch_whose_drafts_bring_nothing_is_rarely_asked(monkeypatch, texts, tree, shares):
    """Texts of 150 tokens, the same as one token at a time. A text alone, and a tree that is named, in every cycle."""
    asked = []
    begin = TreeDrafter._begin_drafts
    monkeypatch.setattr(TreeDrafter, "_begin_drafts", lambda *args: asked.append(1) or begin(*args))
    spec = build_hopeless_spec(tree)
    prompts = [[5, 6, 7 + text] for text in range(texts)]
    options = {"max_new_tokens": 150, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    outputs = spec.generate(prompts, **options)
    cycles = max(output.stats.cycles for output in outputs)
    least, most = shares
    assert least * cycles <= len(asked) <= most * cycles
    wanted = spec.baseline().generate(prompts, **options)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]


def test_the_batch_decides_the_trees_and_never_the_text():
    model = target("llama")
    spec = Spec(model, random_head(model), "auto", times=free_alone_dear_together)
    options = {"temperature": 1.0, "max_new_tokens": 30, "seed": 3}
    outputs = spec.generate([[5, 6, 7], [8, 9]], **options)
    shorter = min((output.stats for output in outputs), key=lambda stats: stats.cycles)  # never alone
    assert sum(shorter.drafted) < shorter.cycles
    alone = spec.new().generate([5, 6, 7], **options)
    assert sum(alone.stats.drafted) > alone.stats.cycles
    assert alone.token_ids == outputs[0].token_ids == spec.baseline().generate([5, 6, 7], **options).token_ids


def test_an_engine_measures_before_the_first_request():
    asked = []
    model = target("llama")
    spec = Spec(model, random_head(model), "auto", times=lambda texts: asked.append(texts) or linear_cost())
    with Engine(spec, batch=6):
        assert asked == [1]
    spec.generate([[5], [6], [7]], max_new_tokens=2)
    assert {*asked} == {1, 3}


def given_tree():
    """Two continuations of four tokens each."""
    return merge_continuations([[first, 2, 3, 4] for first in (1, 5)], 8, 1, lambda length: 0.6, 0.0)


def test_cheap_nodes_are_all_kept_and_dear_ones_none():
    assert len(keep_profitable_nodes(given_tree(), linear_cost(1e-6)).tokens) == 8
    assert keep_profitable_nodes(given_tree(), linear_cost(0.05)).tokens == []


def test_the_kept_nodes_are_a_subtree_with_their_ancestors():
    for node in (5e-4, 1e-3, 2e-3, 4e-3):
        kept = keep_profitable_nodes(given_tree(), linear_cost(node)).build_token_tree(7, torch.device("cpu"))
        assert 1 <= len(kept.tokens) <= 9
        for i, parent in enumerate(kept.parents.tolist()):
            assert parent < i
            above = kept.ancestors[i].clone()
            above[i] = False
            assert torch.equal(above, kept.ancestors[parent] if parent >= 0 else torch.zeros_like(above))
            assert int(kept.depth[i]) == int(above.sum())


def test_the_first_trees_on_an_accelerator_already_have_a_fixed_shape():
    """A CUDA graph may then record them, in a batch that a new sequence has just joined too; a CPU chooses by level."""
    params = SamplingParams(0.0)
    builders = [AutoBuilder(AutoTree(), TopK(), CALIBRATION, lambda batch: linear_cost()) for _ in range(2)]
    gains = [builders[0].predict_gain(params, 1, on_cpu=False), builders[1].predict_gain(params, 1)]
    assert not any(builder.should_skip_cycle(gain) for builder, gain in zip(builders, gains, strict=True))
    assert builders[0].build_graph_key() == builders[0].shape.tree
    assert builders[1].build_graph_key() is None
