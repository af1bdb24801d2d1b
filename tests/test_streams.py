"""One Spec decodes one text at a time, and says so: streams, threads, and what was left half done."""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
from commands import complains, interrupt_call
from drafters import source_of
from models import join_tokens, plain_generate, prompt, random_head, small, target

from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer
from treespec.errors import SupersededError
from treespec.model.target import Target

NEW = 16
ONE = prompt()
OTHER = prompt(length=9, seed=11)
SOURCES = {
    "head": random_head,
    "model": lambda model: ModelProposer(small(), model),
    "suffix": lambda model: source_of("suffix:tokens=0", model),
    "baseline": lambda model: None,
}


def spec_by(name):
    own_tree = name in ("suffix", "baseline")
    return Spec(target("llama"), SOURCES[name](target("llama")), None if own_tree else "2x2")


@pytest.fixture(scope="module", params=SOURCES)
def spec(request):
    return spec_by(request.param)


@pytest.fixture(scope="module")
def wanted():
    """By prompt length, the target's own greedy answers."""
    return {len(ids): plain_generate(target("llama"), ids, NEW) for ids in (ONE, OTHER)}


def answer(spec, ids):
    return spec.generate(ids, max_new_tokens=NEW).token_ids


def test_a_stream_goes_on_unless_another_text_has_begun(spec, wanted):
    """A stream that has begun is superseded by one that begins; both orders, and by `generate`."""
    first, second = (spec.stream(ids, max_new_tokens=NEW) for ids in (ONE, OTHER))
    begun = join_tokens(itertools.islice(first, 2))
    assert join_tokens(second) == wanted[len(OTHER)]
    for _ in range(2):  # and not an end, however often it is asked
        with pytest.raises(SupersededError, match=r"Finish or close .* spec.new\(\)"):
            list(first)
    seen = first.output.token_ids  # to the end of a cycle
    assert seen == wanted[len(ONE)][: len(seen)]
    assert seen[: len(begun)] == begun
    for piece in (running := spec.stream(ONE, max_new_tokens=NEW)):
        assert piece.token_ids
        break
    assert answer(spec, OTHER) == wanted[len(OTHER)]
    with pytest.raises(SupersededError):
        list(running)
    assert answer(spec, ONE) == wanted[len(ONE)]


def test_a_stream_that_is_left_in_any_way_spoils_nothing(spec, wanted):
    def closed(stream):
        stream.close()
        assert list(stream) == []

    def left(stream):
        with stream as own:
            assert next(own).token_ids
        assert list(stream) == []

    def collected(stream):
        del stream
        gc.collect()

    for leave in (closed, left, collected, lambda stream: None):
        stream = spec.stream(ONE, max_new_tokens=NEW)
        begun = join_tokens(itertools.islice(stream, 1))
        assert stream.stats.new_tokens >= len(begun) > 0
        leave(stream)
        del stream
        assert answer(spec, OTHER) == wanted[len(OTHER)]


@pytest.mark.parametrize("stage", ["forward_trees", "compute_output_logits"])
def test_an_interrupt_anywhere_spoils_nothing(spec, wanted, monkeypatch, stage):
    """Ctrl-C within the forward of the target, of a prompt, or of a drafter that is the target itself."""
    answer(spec, OTHER)
    monkeypatch.setattr(Target, stage, interrupt_call(getattr(Target, stage), 3))
    stream = spec.stream(ONE, max_new_tokens=NEW)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    with complains("interrupted by KeyboardInterrupt"):
        list(stream)
    assert answer(spec, ONE) == wanted[len(ONE)]


def together(*tasks):
    """What each of them returns, run in threads that begin at once."""
    barrier = Barrier(len(tasks))

    def begin(task):
        barrier.wait(60)
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(120) for future in [pool.submit(begin, task) for task in tasks]]


def test_threads_that_generate_with_one_spec_take_turns(spec, wanted):
    prompts = [ONE, OTHER, ONE, OTHER]
    found = together(*(lambda ids=ids: answer(spec, ids) for ids in prompts))
    assert found == [wanted[len(ids)] for ids in prompts]


def test_threads_with_a_spec_each_share_the_target(spec, wanted):
    """Whatever drafts: aux hidden states are those of one thread's forward."""
    specs = [spec, spec.new(), spec_by("model"), spec_by("baseline")]
    found = together(*(lambda one=one: answer(one, ONE) for one in specs))
    assert found == [wanted[len(ONE)]] * len(specs)


def test_a_thread_that_generates_ends_anothers_stream_and_waits_for_none(spec, wanted):
    stream = spec.stream(ONE, max_new_tokens=NEW)
    begun = Event()
    generated = Event()

    def streams():
        seen = join_tokens(itertools.islice(stream, 1))
        begun.set()
        assert generated.wait(60)
        with pytest.raises(SupersededError):
            list(stream)
        return seen

    def generates():
        assert begun.wait(60)
        found = answer(spec, OTHER)
        generated.set()
        return found

    seen, found = together(streams, generates)
    assert seen == wanted[len(ONE)][: len(seen)]
    assert found == wanted[len(OTHER)]


def test_a_stream_never_supersedes_a_thread_that_generates(wanted):
    """Streams begin over and over while a thread generates: each waits for the answer, or ends."""
    spec = spec_by("baseline")

    def streams():
        for _ in range(20):
            next(spec.stream(OTHER, max_new_tokens=NEW))

    found, *_ = together(lambda: [answer(spec, ONE) for _ in range(5)], streams)
    assert found == [wanted[len(ONE)]] * 5
