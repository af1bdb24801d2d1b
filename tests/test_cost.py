"""The cost model: a value, measured once for a machine, and updated while a sequence is decoded."""

import itertools
import json
import math
import os
import time
from dataclasses import asdict, replace

import faults
import numpy as np
import pytest
from drafters import linear_cost
from models import GROUPED, random_head, random_model, target
from transformers import MistralConfig

from treespec.draft.auto import cost_model as running
from treespec.draft.auto import measure
from treespec.draft.auto.cost import COST_FORMAT, CycleCost, read_cost
from treespec.draft.auto.cost_model import (
    CacheOrModel,
    Correction,
    CostModel,
    CostModels,
    Prediction,
    can_pay_in_cache,
    limit_sum,
)
from treespec.draft.auto.measure import list_dependencies, load_or_measure_cost, measure_context, measure_costs
from treespec.draft.heads.eagle import EagleProposer
from treespec.files.atomic import write_json
from treespec.kernels.processor import describe_processor
from treespec.model.target import Target
from treespec.trees.most_likely import estimate_length
from treespec.trees.sequoia import build_sequoia_tree


@pytest.fixture
def llama_head():
    model = target("llama")
    return model, EagleProposer(random_head(model), model)


def test_the_line_goes_through_the_measured_sizes_never_falls_and_goes_on():
    cost = CycleCost((1, 4, 8), (0.010, 0.016, 0.012))
    assert cost.interpolate_forward(range(1, 9)).tolist() == pytest.approx(
        [0.010, 0.012, 0.014, 0.016, 0.016, 0.016, 0.016, 0.016]
    )
    assert CycleCost((1, 2), (1.0, 1.5)).interpolate_forward(6) == pytest.approx(3.5)


def test_a_cycle_costs_its_forward_its_levels_and_an_overhead():
    cost = CycleCost((1, 64), (1.0, 1.63), level=0.5, begin=0.25, overhead=0.1)
    assert cost.seconds_per_extra_row == pytest.approx(0.5 * 0.01)  # a level over n nodes grows as T(n) / T(1)
    assert cost.predict_cycle(11, 3) == pytest.approx(1.1 + 0.1 + 0.25 + 1.5)
    assert cost.predict_cycle(11, 3, inner=5) == pytest.approx(1.1 + 0.1 + 0.25 + 1.5 + 2 * cost.seconds_per_extra_row)
    assert cost.predict_cycle(11, 0) == pytest.approx(1.1 + 0.1)  # without a draft model
    assert cost.predict_cycle(1, 0) == pytest.approx(1 / cost.baseline_speed)


@pytest.mark.parametrize("step", [0.0, 0.1, 1.0])
def test_the_best_tree_is_the_fastest_of_all_sizes_and_depths(step):
    rates = np.array([[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]])
    cost = CycleCost((1, 8, 16), (1.0, 1.3, 2.0), step, 0.2, 0.1)
    tree, speed = cost.find_best_tree(rates, 16, 6)
    table = [rates[0], *[rates[1]] * 5]

    def speed_of(other):
        levels = other.max_depth
        inner = max(other.size / 2, levels)
        return estimate_length(other, table) / cost.predict_cycle(other.size, levels, inner)

    assert speed == pytest.approx(speed_of(tree), rel=0.02)
    others = [build_sequoia_tree(rates[1], n, d) for n in range(2, 17) for d in range(1, 7)]
    assert speed >= max(map(speed_of, others)) * (1 - 1e-9)


def test_a_cost_is_kept_in_a_file_while_it_holds(tmp_path, monkeypatch, llama_head):
    monkeypatch.setattr(measure, "MAX_COST_DRIFT", math.inf)
    first = load_or_measure_cost(*llama_head, tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert len(first.nodes) > 2
    assert min(*first.forward, first.level + first.begin) > 0
    kept = {"format": COST_FORMAT, "cost": asdict(first) | {"begin": 12.5}}
    write_json(file, kept)
    assert load_or_measure_cost(*llama_head, tmp_path / "new").begin == 12.5
    for damaged in ("{", json.dumps(kept | {"format": 0})):
        file.write_text(damaged)
        assert load_or_measure_cost(*llama_head, tmp_path / "new").begin < 12.5
        assert json.loads(file.read_text())["cost"]["begin"] < 12.5
    assert list_dependencies(*llama_head) != list_dependencies(llama_head[0], None)
    write_json(file, kept)
    monkeypatch.setattr(measure, "MAX_COST_DRIFT", 1.0)  # any change counts, once a process
    assert load_or_measure_cost(*llama_head, tmp_path / "new").begin == 12.5
    measure.CHECKED_FILES.clear()
    os.utime(file, (0, 0))
    assert load_or_measure_cost(*llama_head, tmp_path / "new").begin < 12.5


def test_a_cost_is_checked_once_every_ten_minutes(tmp_path, monkeypatch, llama_head):
    ratios = []  # of the trials to come, the last one first, over that of the first cost
    monkeypatch.setattr(measure, "measure_check_ratio", lambda target, cost: 2.0 * ratios.pop())
    monkeypatch.setattr(measure, "MAX_MISFIT", math.inf)

    def load(*next_ratios):
        """Load the cost in a new process, as it were; return it and the number of unused ratios."""
        measure.CHECKED_FILES.clear()
        ratios[:] = next_ratios
        cost = load_or_measure_cost(*llama_head, tmp_path)
        return cost, len(ratios)

    first, _ = load(1.0)
    (file,) = tmp_path.iterdir()
    assert load(1.2) == (first.scale_forward(2.4), 0)  # a new file's cost is checked
    assert load(1.0) == (first.scale_forward(2.4), 1)  # not again within ten minutes
    os.utime(file, (time.time() - 601,) * 2)
    unbent, unused = load(1.0, 1.9)  # a second trial, since the first one was disturbed
    assert unused == 0
    assert unbent.forward == pytest.approx(first.forward, rel=1e-12)
    os.utime(file, (time.time() + 60,) * 2)
    changed, unused = load(1.0, 1.5, 0.6)  # two trials fail, and one is of the new cost
    assert changed != first
    assert unused == 0


def test_a_cost_that_other_work_disturbed_is_measured_once_more(tmp_path, monkeypatch, llama_head):
    factors = []  # of the trials to come over the cost's own ratio, the last one first

    def try_forwards(target, cost):
        return measure.divide_checked_forwards(cost) * factors.pop()

    monkeypatch.setattr(measure, "measure_check_ratio", try_forwards)
    factors[:] = [7.0, 1.0, 0.5]
    cost = load_or_measure_cost(*llama_head, tmp_path / "disturbed")
    assert factors == [7.0]
    assert cost.check_ratio == measure.divide_checked_forwards(cost)
    factors[:] = [7.0, 1.1]
    load_or_measure_cost(*llama_head, tmp_path / "quiet")
    assert factors == [7.0]
    factors[:] = [7.0, 3.0, 3.0]  # a machine that is never quiet is not measured for ever
    load_or_measure_cost(*llama_head, tmp_path / "busy")
    assert factors == [7.0]


def test_a_bent_cost_has_the_ratio_that_the_trial_measured():
    cost = CycleCost((1, 4, 16, 64), (10.0, 12.0, 20.0, 40.0), level=1.0, check_ratio=2.0)
    bent = cost.scale_forward(1.5)
    assert bent.forward[0] == 10.0
    assert bent.forward[2] == pytest.approx(15.0)
    assert bent.forward[3] == pytest.approx(10 * 1.5**2)
    assert bent.scale_forward(2.0).forward == pytest.approx(cost.forward)
    flat = replace(cost, check_ratio=1.02)
    assert flat.scale_forward(1.5) == flat


@pytest.mark.parametrize(
    "damage",
    [{"forward": [0.1]}, {"begin": float("nan")}, {"overhead": [0.1]}, {"level": None}, {"nodes": [1]}, {"more": 1.0}],
)
def test_kept_numbers_that_cannot_be_right_are_not_used(tmp_path, damage):
    for fields, wanted in ((asdict(linear_cost()), linear_cost()), (asdict(linear_cost()) | damage, None)):
        write_json(tmp_path / "times.json", {"format": COST_FORMAT, "cost": fields})
        assert read_cost(tmp_path / "times.json") == wanted


def test_a_cache_that_cannot_be_written_is_measured_again(tmp_path, llama_head):
    (tmp_path / "file").write_text("")
    assert load_or_measure_cost(*llama_head, tmp_path / "file" / "below").forward[0] > 0


def test_a_batch_computes_the_nodes_of_all_in_one_forward():
    cost = CycleCost((1, 4, 8), (1.0, 2.5, 4.5), level=0.3, begin=0.1, overhead=0.01)
    of_two = cost.select_batch_size(2)
    assert of_two.forward == pytest.approx((1.5, 4.5, 8.5))
    assert (of_two.level, of_two.begin, of_two.overhead) == pytest.approx((0.45, 0.15, 0.02))
    assert cost.select_batch_size(1) == cost
    measured = replace(cost, text_level=0.2, text_begin=0.05).select_batch_size(3)
    assert (measured.level, measured.begin) == pytest.approx((0.7, 0.2))
    assert measure_costs(target("llama"), None, linear_cost())(7) == linear_cost()


def test_a_node_costs_its_seconds_once_for_each_sequence_that_it_delays():
    """The drawing of `CycleCost.spread_nodes`: T(n) = n seconds of one sequence, 4 n of four."""
    cost = CycleCost((1, 64), (1.0, 64.0)).select_batch_size(4)
    assert cost.spread_nodes(5, others=3) == 3.5
    assert cost.interpolate_forward(3.5) == 14
    assert cost.compute_forward_price(5, others=3) == 12 + 4 * 2  # two nodes more than the others, four sequences wait
    assert cost.forward_prices[4] == cost.compute_forward_price(5)
    alone = CycleCost((1, 64), (1.0, 64.0))
    assert alone.compute_forward_price(5) == alone.interpolate_forward(5)


def test_the_drawing_of_predicted_and_actual_acceptance():
    """Drawn in treespec/draft/auto/cost_model.py."""
    correction = Correction(0.0)
    correction.update(Prediction(1.0, [-1, 0, 0, 1], [1, 0.6, 0.2, 0.5]), [1])
    assert correction.predicted == [[0.6, 0.2], [0.5, 0]]
    assert correction.accepted == [[1, 0], [0, 0]]


def test_the_drawing_of_bounded_probabilities():
    for given, wanted in (
        ([0.9, 0.2, 0.1], [0.9, 0.16 / 3, 0.08 / 3]),
        ([1.1, 0.2], [0.98, 0.0]),
        ([0.5, 0.2], [0.5, 0.2]),
        ([1.0], [0.98]),
    ):
        assert limit_sum(given) == pytest.approx(wanted)


def test_a_sequence_whose_drafts_fail_tries_again_ever_more_rarely():
    model = CostModel(linear_cost())
    pauses = [model.should_skip_cycle(speed=model.plain) for _ in range(1000)]
    assert [cycle for cycle, pause in enumerate(pauses) if not pause] == [8, 25, 58, 123, 252, 509]
    hopeless = CostModel(linear_cost())
    assert all(hopeless.should_skip_cycle(speed=0.5 * hopeless.plain) for _ in range(500))
    assert not model.should_skip_cycle(speed=1.1 * model.plain)


def brought(choice, accepted, cycles, seconds=None):
    """What a draft model brings in some cycles: accepted tokens each, in modelled seconds each."""
    for _ in range(cycles):
        choice.update(accepted, seconds)


def test_no_offer_wins_where_the_lookup_is_left_out():
    """A forward whose nodes cost as much as a token each, and a batch in which they cost nearly that."""
    for slope, batch in itertools.product((0.1, 0.5, 0.9, 1.0), (1, 2, 8, 64)):
        cost = CycleCost((1, 64), (1.0, 1.0 + 63 * slope), batch=batch)
        choice = CacheOrModel()
        offers = [choice.should_use_cache(nodes - 1.0, nodes, cost) for nodes in range(2, 200)]
        assert can_pay_in_cache(cost) >= any(offers)
    assert not can_pay_in_cache(CycleCost((1, 64), (1.0, 64.0), batch=8))
    assert can_pay_in_cache(CycleCost((1, 64), (1.0, 2.0), batch=8))
    assert can_pay_in_cache(None)


def test_a_choice_follows_what_the_draft_model_brings_now():
    """Hundreds of cycles that accepted six tokens weigh nothing after forty that accepted none, and the other way."""
    choice = CacheOrModel()
    brought(choice, 6, 300)
    assert not choice.should_use_cache(5.0, 6, None)
    brought(choice, 0, 40)
    assert choice.should_use_cache(0.3, 6, None)
    brought(choice, 6, 40)
    assert not choice.should_use_cache(5.0, 6, None)


def test_a_choice_follows_what_the_draft_models_cycles_cost_now():
    """As a batch empties: with the same tokens a cycle, the speed of the last cycles counts."""
    choice = CacheOrModel()
    cost = linear_cost()
    cycle = cost.predict_cycle(6, 0)  # of the cache's tree, which predicts two tokens
    brought(choice, 2, 300, 2 * cycle)
    assert choice.should_use_cache(2.0, 6, cost)
    brought(choice, 2, 40, cycle / 2)
    assert not choice.should_use_cache(2.0, 6, cost)
    brought(choice, 2, 40, 2 * cycle)
    assert choice.should_use_cache(2.0, 6, cost)


@pytest.mark.parametrize(
    "fault, find",
    [
        (faults.never_forget_tokens, test_a_choice_follows_what_the_draft_model_brings_now),
        (faults.never_forget_cycles, test_a_choice_follows_what_the_draft_model_brings_now),
        (faults.never_forget_seconds, test_a_choice_follows_what_the_draft_models_cycles_cost_now),
    ],
)
def test_a_choice_that_never_forgets_one_number_is_found(monkeypatch, fault, find):
    faults.plant(monkeypatch, CacheOrModel, CacheOrModel.update, fault)
    with pytest.raises(AssertionError):
        find()


def test_a_choice_that_never_forgets_is_found(monkeypatch):
    monkeypatch.setattr(running, "CHOICE_DECAY", 1.0)
    with pytest.raises(AssertionError):
        test_a_choice_follows_what_the_draft_model_brings_now()
    with pytest.raises(AssertionError):
        test_a_choice_follows_what_the_draft_models_cycles_cost_now()


def test_batch_sizes_have_their_own_speed_and_pauses_but_share_corrections():
    by_batch = {batch: linear_cost(node=1e-3 * batch) for batch in (1, 8)}
    models = CostModels(lambda batch: by_batch[batch], (0.5, 0.2))
    alone = models.select_for_batch(1)
    among = models.select_for_batch(8)
    assert (alone.cost, among.cost) == (by_batch[1], by_batch[8])
    assert among is models.current is not alone
    assert among.logit_correction is alone.logit_correction
    assert among.should_skip_cycle(among.plain)
    assert (among.idle, alone.idle) == (1, 0)
    assert among.gap == 8 * alone.gap
    assert models.select_for_batch(1) is alone
    assert models.select_for_batch(8) is among
    same = CostModels(lambda batch: by_batch[1])
    assert same.select_for_batch(8) is same.select_for_batch(1)  # costs that know nothing of the batch


def test_a_processor_is_its_name_and_its_instruction_sets(tmp_path):
    text = "processor : 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma sse\n\nmodel name\t: AMD EPYC\n"
    (tmp_path / "old").write_text(text)
    (tmp_path / "new").write_text(text.replace("avx2", "avx2 avx512_bf16"))
    old = describe_processor(tmp_path / "old")
    new = describe_processor(tmp_path / "new")
    assert old.startswith("AMD EPYC, ")
    assert old.endswith("avx2 fma")
    assert new.endswith("avx2 avx512_bf16 fma")
    assert describe_processor(tmp_path / "no such file").split(",")[0]


def test_each_node_of_a_longer_text_costs_more():
    """Steps of 512 tokens beyond 192, in which each node attends to all of them."""
    cost = CycleCost((1, 4, 8), (1.0, 2.5, 4.5), context=1e-3, node_context=5e-4)
    assert cost.select_length(703) is cost
    assert cost.select_length(704).forward == pytest.approx((1.512, 2.5 + 512 * 2.5e-3, 4.5 + 512 * 4.5e-3))
    assert cost.select_length(1215).forward == cost.select_length(704).forward
    of_two = cost.select_batch_size(2).select_length(704)
    assert of_two.forward[0] == pytest.approx(cost.select_batch_size(2).forward[0] + 2 * 0.512)
    assert linear_cost().select_length(10_000) == linear_cost()  # a cost that knows nothing of the text


@pytest.mark.parametrize("window", [None, 6])
def test_the_cost_of_context_is_measured_without_a_prompt(window):
    config = MistralConfig(**GROUPED | {"max_position_embeddings": 4096}, sliding_window=window)
    for seconds in measure_context(Target(random_model(config))):
        assert 0 <= seconds < math.inf
