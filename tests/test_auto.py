"""Auto trees: sizes that maximise the ratio, times that are kept, and the same text whatever is chosen."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import transformers as hf
from models import GROUPED, TableConfig, TableModel, random_head, random_model, target

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.fit import timing
from treespec.draft.fit.ends import rests
from treespec.draft.fit.measure import WIDE, draft_times, times_for
from treespec.draft.grow.likeliest import expansion, grow_likeliest
from treespec.draft.grow.settled import shape_for
from treespec.draft.pace.pace import Pace, Promise, Trust, bounded
from treespec.draft.pace.times import NODES, Times, kept_times, key
from treespec.draft.pairing import check_pair
from treespec.draft.trained.eagle import EagleProposer
from treespec.files.atomic import write_json
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams
from treespec.trees.auto import AutoTree, best_size
from treespec.trees.mask import ancestor_mask
from treespec.trees.medusa import expected_length
from treespec.trees.policy import policy
from treespec.trees.sequoia import sequoia
from treespec.trees.static import StaticTree, TreeError, chain
from treespec.verify.registry import SCHEMES

RATES = {"1": (0.5, 0.2, 0.1)}
CALIBRATION = Calibration(
    (0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0), {"1": [(0.1, 4.0), (0.01, 30.0)]}, (0.1, 0.8, -1, 0), RATES
)


def times(node: float = 0.001, step: float = 0.002) -> Times:
    """A forward of 10 ms and what each further node and each level of drafts add, in seconds."""
    level = (step, step)
    return Times(NODES, tuple(0.01 + node * (n - 1) for n in NODES), step, step, level, level, level)


def test_the_drawing():
    reach, forward = np.array([0.7, 0.5, 0.3, 0.2, 0.1]), np.array([1, 1.1, 1.2, 1.5, 2.0, 2.5])
    worth = [best_size(reach[:n], forward[: n + 1], 1.0)[1] for n in range(6)]
    assert worth == pytest.approx([0, 0.6, 1.0, 1.0, 1.0, 1.0])
    size, value = best_size(reach, forward + np.array([0, 0, 0, 1e-3, 0, 0]), 1.0)
    assert (size, value) == (3, pytest.approx(1.0))


@pytest.mark.parametrize(("deep", "few"), [(5, 3), (2, 2), (1, 1)])
def test_seconds_of_known_drafts_give_back_what_levels_and_further_nodes_cost(deep, few):
    """A shape's costs are linear in its levels and its further nodes; a head of one level has no further ones."""
    kinds = {"chosen": (7.0, 2.0), "drawn": (6.0, 3.0), "single": (5.0, 1.0), "fixed": (4.0, 1.5)}
    row, drawn_row = 0.25, 0.5
    seconds = [first + step * (levels - 1) for first, step in kinds.values() for levels in (1, deep)]
    wide = seconds[1] + (deep - 1) * (WIDE - 1) * row
    wider = 6.0 + 3.0 * (few - 1) + (2**few - 1 - few) * drawn_row
    found = draft_times([*seconds, wide, wider], deep, few)
    if deep == 1:
        kinds = {name: (first, 0.0) for name, (first, _) in kinds.items()}
        row = drawn_row = 0.0
    assert (found.pop("begin"), found.pop("step")) == kinds.pop("chosen")
    assert found == {**kinds, "row": row, "drawn_row": drawn_row}


def test_the_end_of_a_tree_of_draws_is_the_mean_of_its_best_and_worst_verdict():
    """Seconds of the seven steps of `ends`: trees of 7 and of 15 nodes have two verdicts each."""
    assert rests([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]) == ((1.0, 2.0, 3.0, 5.0), 0.5)
    assert rests([1.0, 2.0, 3.0, 6.0, 6.0, 5.0, 5.0])[1] == 0


def test_the_best_size_at_its_own_rate_maximises_tokens_a_second():
    """Dinkelbach's iteration against every size, for 50 random reaches and costs."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        reach = np.sort(generator.random(30))[::-1]
        forward = 0.01 + 0.01 * generator.random(31).cumsum()
        ratios = np.concatenate([[1], 1 + reach.cumsum()]) / forward
        rate = float(ratios[0])
        for _ in range(20):
            size, _ = best_size(reach, forward, rate)
            rate = float(ratios[size - 1])
        assert rate == pytest.approx(float(ratios.max()))


def test_forward_times_go_through_the_measured_ones_and_never_fall():
    measured = Times((1, 4, 8), (0.010, 0.016, 0.012), 0.0, 0.0, (0.0, 0.0), (0.0, 0.0))
    found = measured.forward(8)
    assert found.tolist() == pytest.approx([0.010, 0.012, 0.014, 0.016, 0.016, 0.016, 0.016, 0.016])


def test_times_are_measured_once_and_kept_in_a_file(tmp_path, monkeypatch):
    model = target("llama")
    head = EagleProposer(random_head(model), model)
    monkeypatch.setattr(timing, "LEAST", math.inf)  # other tests may keep the machine busy
    first = times_for(model, head, tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert key(model, head) in file.name
    assert first.nodes == NODES[: len(first.nodes)]
    assert len(first.nodes) > 4
    assert min(*first.target, first.begin, first.drawn[0]) > 0
    write_json(file, asdict(first) | {"begin": 12.5})
    assert times_for(model, head, tmp_path / "new").begin == 12.5
    file.write_text("{")
    assert times_for(model, head, tmp_path / "new").begin < 12.5
    assert json.loads(file.read_text())["begin"] < 12.5


@pytest.mark.parametrize(
    "damage", [{"target": [0.1]}, {"begin": float("nan")}, {"drawn": [0.1]}, {"single": None}, {"nodes": [1]}]
)
def test_kept_times_that_cannot_be_right_are_not_used(tmp_path, damage):
    write_json(tmp_path / "times.json", asdict(times()))
    assert kept_times(tmp_path / "times.json") == times()
    write_json(tmp_path / "times.json", asdict(times()) | damage)
    assert kept_times(tmp_path / "times.json") is None


def test_a_cache_that_cannot_be_written_is_measured_again(tmp_path):
    (tmp_path / "file").write_text("")
    model = target("llama")
    assert times_for(model, EagleProposer(random_head(model), model), tmp_path / "file" / "below").begin > 0


def test_a_short_context_is_measured_too(tmp_path):
    model = Target(random_model(hf.LlamaConfig(**GROUPED | {"max_position_embeddings": 40})))
    assert times_for(model, EagleProposer(random_head(model), model), tmp_path).begin > 0


def test_the_pace_learns_how_far_promises_are_kept_of_first_children_and_of_others():
    """Of first children half are accepted where all but a tenth were promised, of the others as many as promised."""
    pace = Pace(times(), (0.9, 0.1))
    pace.start(100.0)
    assert pace.by_law.factors.tolist() == [[1, 1], [1, 1]]
    for cycle in range(300):
        pace.promise = Promise(pace.by_law, 0.02, np.array([-1, 0, 0]), np.array([1, 0.9, 0.1]))
        pace.settle([[1], [], [1], [], [1], [], [1], [], [1], [2]][cycle % 10])
    first, others = pace.by_law.factors[0].tolist()
    assert pace.by_law.factors[1].tolist() == [1, 1]
    assert pace.by_rates.factors.tolist() == [[1, 1], [1, 1]]
    assert first == pytest.approx(0.5 / 0.9, rel=0.1)
    assert others == pytest.approx(1, rel=0.3)
    assert pace.speed == pytest.approx(1.6 / 0.02, rel=0.1)


def test_the_drawing_of_promises_kept():
    """Drawn in treespec/draft/pace/pace.py."""
    trust = Trust(0.0)
    trust.settle(Promise(trust, 1.0, np.array([-1, 0, 0, 1]), np.array([1, 0.6, 0.2, 0.5])), [1])
    assert trust.promised.tolist() == [[0.6, 0.2], [0.5, 0]]
    assert trust.kept.tolist() == [[1, 0], [0, 0]]


def test_a_text_whose_drafts_hold_below_a_right_one_gets_deeper_trees():
    """The first draft of a cycle is right half the time, and below it nine of ten; or two of three at any depth."""
    depths = []
    for at_root, deeper in ((0.5, 0.9), (2 / 3, 2 / 3)):
        pace = Pace(times(1e-4, 1e-3), (2 / 3, 0.1))
        pace.by_rates.promised, pace.by_rates.kept = (np.full((2, 2), 100.0) for _ in range(2))
        pace.by_rates.kept[:, 0] *= np.array([at_root, deeper]) * 1.5
        depths.append(shape_for(pace, AutoTree(), None).tree.max_depth)
    assert depths[0] > depths[1] + 2


def test_the_drawing_of_bounded_chances():
    assert bounded(np.array([[0.9, 0.2, 0.1]])) == pytest.approx(np.array([[0.9, 0.16 / 3, 0.08 / 3]]))
    assert bounded(np.array([[1.1, 0.2]])) == pytest.approx(np.array([[0.98, 0.0]]))
    assert bounded(np.array([[0.5, 0.2]])) == pytest.approx(np.array([[0.5, 0.2]]))
    assert bounded(np.array([[1.0]])) == pytest.approx(np.array([[0.98]]))


def first_children(parents: list[int]) -> list[int]:
    """The path of the first child of each node, from the root."""
    path = []
    node = 0
    while node in parents:
        node = parents.index(node)
        path.append(node)
    return path


def test_a_text_whose_first_children_are_all_accepted_gets_the_deepest_chain():
    """Chances of other children take nothing from the first's, however high both were before."""
    pace, tree = Pace(times(1e-4, 1e-3), (0.88, 0.1, 0.05)), AutoTree()
    for _ in range(60):
        pace.promise = shape_for(pace, tree, 0).promise(pace)
        pace.settle(first_children(pace.promise.parents.tolist()))
    shape = shape_for(pace, tree, 0).tree
    assert shape.max_depth == tree.depth
    assert shape.size <= tree.depth + 3


def test_without_hope_the_text_goes_without_drafts_and_tries_again_ever_more_rarely():
    pace = Pace(times())
    rests = [pace.rests(speed=pace.plain) for _ in range(1000)]
    assert [cycle for cycle, rest in enumerate(rests) if not rest] == [8, 25, 58, 123, 252, 509]
    hopeless = Pace(times())
    assert all(hopeless.rests(speed=0.5 * hopeless.plain) for _ in range(500))
    assert not pace.rests(speed=1.1 * pace.plain)


def grown(node: float, step: float, temperature: float = 0.0) -> tuple[float, float]:
    """Mean nodes and levels of the trees of one text."""
    model = Target(TableModel(TableConfig(8, seed=1)))
    spec = Spec(
        model, random_head(model, seed=2), "auto", "traversal", calibration=CALIBRATION, times=times(node, step)
    )
    stats = spec.generate([1, 2], temperature=temperature, max_new_tokens=200, seed=0).stats
    return sum(stats.drafted) / stats.cycles, len(stats.drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dearer_nodes_give_smaller_trees_and_dearer_steps_shallower_ones(temperature):
    cheap, dear = grown(1e-5, 1e-5, temperature), grown(3e-3, 1e-5, temperature)
    assert dear[0] < cheap[0] / 2
    assert grown(1e-5, 3e-2, temperature)[1] < cheap[1]
    assert grown(1e-5, 1.0, temperature)[1] <= 1


def test_the_shape_for_draws_is_the_fastest_of_sequoias_by_what_was_accepted_so_far():
    """To the grain of trust; of a tree's levels half of the nodes are taken to be inner ones."""
    pace, tree, rates = Pace(times(5e-4, 1e-3), (0.5, 0.2, 0.1)), AutoTree(nodes=20, depth=5), (0.5, 0.2, 0.1)

    def speed(shape: StaticTree, trusted: tuple[float, ...]) -> float:
        expected = expected_length(shape, torch.tensor([trusted] * shape.max_depth))
        return expected / pace.cost(shape.size, shape.max_depth, shape.max_draws)

    for trust in (1.0, math.exp(-3.0)):
        pace.by_rates.kept, pace.by_rates.promised = np.full((2, 2), trust), np.ones((2, 2))
        found = shape_for(pace, tree, None)
        trusted = tuple(rate * trust for rate in rates)
        assert found.speed == pytest.approx(speed(found.tree, trusted))
        others = [sequoia(torch.tensor(trusted), n, d) for d in range(1, 6) for n in range(2, 21)]
        assert found.speed == pytest.approx(max(speed(other, trusted) for other in others))
    assert shape_for(pace, tree, 1).tree == chain(shape_for(pace, tree, 1).tree.max_depth)


def test_the_drawing_of_what_is_expanded():
    """Of nodes reached by .8 and .2, at .7 for a child, .1 for a node and .2 for a level."""
    reach = np.array([0.8, 0.2])
    assert expansion(reach, 0.7, price=0.1, step=0.2, row=0.0, levels=1) == 2
    assert expansion(reach, 0.7, price=0.15, step=0.2, row=0.0, levels=1) == 1
    assert expansion(reach, 0.7, price=0.1, step=0.5, row=0.0, levels=1) == 0
    assert expansion(reach, 0.7, price=0.1, step=0.4, row=0.0, levels=2) == 2


@pytest.mark.parametrize("verifier", ["auto", "topk", "rrs-wo", "traversal", "optimal", "block", "is-lp"])
def test_the_same_seed_gives_the_same_text_whatever_was_said_before(verifier):
    model = Target(TableModel(TableConfig(8, seed=1)))
    spec = Spec(model, random_head(model, seed=2), "auto", verifier, calibration=CALIBRATION, times=times())
    one, _, again = (spec.generate([1, 2], temperature=1, max_new_tokens=60, seed=seed) for seed in (0, 1, 0))
    assert one.token_ids == again.token_ids
    assert one.stats.accepted == again.stats.accepted


def test_an_auto_tree_goes_with_every_scheme_and_needs_no_calibration():
    for name, scheme in SCHEMES.items():
        check_pair(AutoTree(), scheme)
        model = Target(TableModel(TableConfig(8, seed=1)))
        spec = Spec(model, random_head(model, seed=2), "auto", name, allow_lossy=True, times=times())
        assert len(spec.generate([1, 2], temperature=1, max_new_tokens=8, seed=0).token_ids) == 8


def test_an_auto_tree_is_named_with_its_options():
    assert policy("auto") == AutoTree()
    assert policy("auto:nodes=20,depth=4,topk=3") == AutoTree(20, 4, 3)
    for wrong in itertools.product(("nodes=1", "depth=0", "topk=0", "price=2")):
        with pytest.raises(TreeError):
            policy(f"auto:{wrong[0]}")


def test_nodes_that_stand_best_first_see_what_is_above_them() -> None:
    """Deep likely paths come first, and shallow nodes may be numbered after them."""
    generator, shallow_last = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        pace = Pace(times(1e-5, 1e-5))
        pace.start(500.0)
        growth = grow_likeliest(
            torch.tensor([1]), sharp(1, generator), AutoTree(nodes=20), SamplingParams(), pace, None
        )
        asked = next(growth)
        try:
            while True:
                asked = growth.send(sharp(len(asked.tokens), generator))
        except StopIteration as end:
            grown = end.value
        assert torch.equal(grown.ancestors, ancestor_mask(grown.parents, int(grown.depth.max())))
        shallow_last += bool(grown.depth[-1] < grown.depth.max())
    assert shallow_last > 20


def sharp(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """[nodes, 30] logits with a likely first child."""
    return 3 * torch.randn(nodes, 30, generator=generator)
