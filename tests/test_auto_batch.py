"""Auto trees see the batch: with enough texts drafting stops paying, and it ends until texts have left."""

import pytest
from models import random_head, target
from test_auto import times

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.draft.fit.measure import measure_up_to, measured_times, times_for
from treespec.draft.model_free.kinds import given_by
from treespec.draft.pace.pace import Paces
from treespec.draft.pace.times import alike, key
from treespec.draft.trained.eagle import EagleProposer

NEW = 60


def test_the_drawing_of_numbers_that_are_measured():
    assert [alike(texts) for texts in (1, 2, 3, 4, 5, 6, 7, 11, 12, 22, 45, 46, 500)] == [
        *(1, 2, 4, 4, 4, 8, 8, 8, 16, 16, 32, 64, 64)
    ]


def test_each_number_of_texts_has_a_speed_and_rests_of_its_own_and_the_trust_is_the_texts():
    by_texts = {texts: times(node=1e-3 * texts) for texts in (1, 8)}
    paces = Paces(lambda texts: by_texts[texts], (0.5, 0.2))
    alone = paces.present
    assert alone.times is by_texts[1]
    among = paces.among(8)
    assert among is paces.present is not alone
    among.by_law.kept += 1
    assert alone.by_law.kept.tolist() == among.by_law.kept.tolist()
    assert among.rests(among.plain)
    assert (among.idle, alone.idle) == (1, 0)
    assert among.gap == 8 * alone.gap
    assert paces.among(1) is alone
    assert paces.among(8) is among
    same = Paces(lambda texts: by_texts[1])
    assert same.among(8) is same.present is same.among(1)  # times that know nothing of the batch


def free_alone_dear_together(texts):
    """Alone a node costs nothing; together each costs as much as the forward. The levels cost nothing."""
    return times(node=1e-7 if texts == 1 else 1e-2, step=1e-7)


@pytest.mark.parametrize("name", ["head", "lookup"])
def test_drafting_ends_where_it_stops_paying_and_begins_again_when_the_others_have_left(name):
    """Of two texts one ends early: while both run hardly a node is drafted, then many are."""
    model = target("llama")
    source = random_head(model) if name == "head" else given_by("lookup")("", model)
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
    assert sum(long.drafted) > 2 * (long.cycles - short.cycles)
    assert texts[0].committed[len(prompt) :] == wanted[:-1]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_seed_gives_the_same_answer_in_any_batch_and_without_one_the_batch_decides(seed):
    """Sampled: its draws depend on the trees, and trees on the times of the batch."""
    model = target("llama")
    spec = Spec(model, random_head(model), "auto", "traversal", times=free_alone_dear_together)
    options = {"temperature": 1.0, "max_new_tokens": 30, "seed": seed}
    outputs = spec.generate([[5, 6, 7], [8, 9]], **options)
    shorter = min((output.stats for output in outputs), key=lambda stats: stats.cycles)  # never alone
    if seed is None:
        assert sum(shorter.drafted) < shorter.cycles
    else:
        assert sum(shorter.drafted) > shorter.cycles
        assert outputs[0].token_ids == spec.new().generate([5, 6, 7], **options).token_ids


def test_an_engine_measures_each_number_of_texts_before_the_first_request():
    asked = []

    def by_texts(texts):
        asked.append(texts)
        return times()

    model = target("llama")
    spec = Spec(model, random_head(model), "auto", times=by_texts)
    with Engine(spec, batch=6):
        assert {1, 2, 4, 8} <= set(asked)
    del asked[:]
    spec.generate([[5], [6], [7]], max_new_tokens=2)
    assert {1, 2, 4} == {alike(texts) for texts in asked}
    del asked[:]
    measure_up_to(20, by_texts)
    assert asked == [1, 2, 4, 8, 16]


def test_times_of_several_texts_are_measured_and_kept_beside_those_of_one(tmp_path):
    model = target("llama")
    head = EagleProposer(random_head(model), model)
    measured = times_for(model, head, tmp_path, texts=2)
    assert min(*measured.target, measured.begin, measured.drawn[0], measured.rest[0]) > 0
    (file,) = tmp_path.iterdir()
    assert file.name == f"times-{key(model, head, 2)}.json" != f"times-{key(model, head)}.json"
    assert times_for(model, head, tmp_path, texts=2) == measured
    given = times()
    assert measured_times(model, head, given)(7) is given
