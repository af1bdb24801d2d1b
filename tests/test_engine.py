"""One engine, many callers: each answer is its own alone, whoever else comes, leaves or fails."""

import threading
from threading import Event

import pytest
from models import random_head, target
from refusals import complains
from serving import held, random_prompts, said, soak

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.errors import Busy
from treespec.model.target import Target

NEW = {"max_new_tokens": 12}
SPECS = {
    "head": lambda: Spec(target("llama"), random_head(target("llama")), "2x2"),
    "baseline": lambda: Spec(target("llama"), None),
}


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]()


@pytest.fixture(scope="module")
def head():
    return SPECS["head"]()


@pytest.fixture
def around(monkeypatch):
    """Replaces a method of `Target` by a function of the original one and its arguments."""

    def replace(name, function):
        original = getattr(Target, name)
        monkeypatch.setattr(Target, name, lambda self, *given: function(lambda: original(self, *given), *given))

    return replace


def alone(spec, prompt, **options):
    return spec.new().generate(prompt, **options).token_ids


def held_up(engine, prompt, **options):
    """A request that runs, and an event that lets the engine's thread go on after its first piece."""
    begun = Event()
    go = Event()

    def on_piece(piece):
        begun.set()
        assert go.wait(60)

    answer = engine.submit(prompt, on_piece=on_piece, **options)
    assert begun.wait(60)
    return answer, go


def mixed(number):
    """Options of a request: its own temperature, limits and seed."""
    own = {"temperature": (0.0, 1.0, 0.7)[number % 3], "top_k": number % 4}
    return own | {"max_new_tokens": 6 + number, "seed": number}


def test_each_of_many_callers_gets_the_answer_of_its_request_alone(spec):
    prompts = random_prompts(9)
    with Engine(spec, batch=4) as engine:
        found = soak(engine, prompts, 5, mixed, cut=0.0)
        beside = spec.generate(prompts[0], **mixed(0))  # the Spec stays free
    wanted = [(number, alone(spec, prompt, **mixed(number)), False) for number, prompt in enumerate(prompts)]
    assert sorted(found) == wanted
    assert beside.token_ids == wanted[0][1]


def test_a_cancelled_request_leaves_within_a_cycle_and_the_others_go_on(spec):
    prompts = random_prompts(3)
    with Engine(spec, batch=2) as engine:
        first, go = held_up(engine, prompts[0], max_new_tokens=80)
        second, third = (engine.submit(prompt, **NEW) for prompt in prompts[1:])
        first.cancel()
        third.cancel()
        assert engine.waiting == 2
        go.set()
        assert list(third) == []
        assert said(second) == alone(spec, prompts[1], **NEW)
        first.result()
        assert first.error is None
        assert len(first.output.token_ids) < 10
        assert first.output.token_ids == alone(spec, prompts[0], max_new_tokens=80)[: first.stats.new_tokens]
        assert (engine.running, engine.waiting) == (0, 0)


def test_a_full_queue_is_busy_and_takes_requests_again_once_one_has_ended(spec):
    (prompt,) = random_prompts(1)
    with Engine(spec, batch=1, queue=1) as engine:
        first, go = held_up(engine, prompt, **NEW)
        second = engine.submit(prompt, **NEW)
        with pytest.raises(Busy, match="try again later"):
            engine.submit(prompt)
        assert (engine.running, engine.waiting) == (1, 1)
        go.set()
        third = first.result() and second.result() and engine.submit(prompt, **NEW)
        assert first.output.token_ids == second.output.token_ids == third.result().token_ids


def test_several_samples_of_a_prompt_share_its_prefill_and_enter_together_or_not_at_all(spec, around):
    prompt = random_prompts(1)[0]
    prefilled = []

    def counted(prefill, cache, tokens, *_):
        prefilled.append(tokens.shape[1])
        return prefill()

    wanted = [alone(spec, prompt, temperature=1.0, seed=seed, **NEW) for seed in (5, 6, 7)]
    around("prefill", counted)
    with Engine(spec, batch=2, queue=1) as engine:
        del prefilled[:]
        answers = engine.submit_n(prompt, 3, seed=5, temperature=1.0, **NEW)
        assert [answer.result().token_ids for answer in answers] == wanted
        assert sum(prefilled) <= len(prompt)  # the last may take the row of another, but for one token
        with pytest.raises(Busy, match="at most 3 may"):
            engine.submit_n(prompt, 4)
        assert engine.waiting == 0


def test_memory_bounds_how_many_run_at_a_time(head, around):
    """Each row counts as long as the longest: beside one of 40 columns, 100 columns hold one more of any length."""
    together = []

    def counted(forward, cache, trees, *_):
        together.append(len(trees))
        return forward()

    around("forward_trees", counted)
    with Engine(head, batch=8, columns=100) as engine:
        _, go = held_up(engine, [5] * 28, **NEW)
        answers = [engine.submit([5] * length, **NEW) for length in (3, 28, 5, 4)]
        go.set()
        assert all(answer.result().token_ids for answer in answers)
        with complains(r"take 101 positions, .* holds 100"):
            engine.submit([5] * 50, max_new_tokens=51)
    assert max(together) == 2


def test_what_fails_for_one_request_ends_that_one_alone(head, around):
    """Its prefill, its processor, its caller."""
    prompts = random_prompts(4)
    bad = [7, 7, 7, 7]

    def without_room(prefill, cache, tokens, *_):
        if tokens[0, :3].tolist() == bad[:3]:
            raise MemoryError("no room")
        return prefill()

    def broken(piece):
        raise LookupError("nobody listens")

    def unfinished(input_ids, scores):
        if input_ids.shape[1] > len(prompts[1]) + 2:
            raise ArithmeticError("a processor broke")
        return scores

    around("prefill", without_room)
    with Engine(head, batch=8) as engine:
        first, go = held_up(engine, prompts[0], **NEW)
        failing = {
            LookupError: engine.submit(prompts[1], on_piece=broken, **NEW),
            MemoryError: engine.submit(bad, **NEW),
            ArithmeticError: engine.submit(prompts[1], logits_processor=unfinished, **NEW),
        }
        others = [engine.submit(prompt, **NEW) for prompt in prompts[2:]]
        go.set()
        for error, answer in failing.items():
            for read in (list, type(answer).result):  # and again, never an end
                with pytest.raises(error):
                    read(answer)
        for prompt, answer in zip((prompts[0], *prompts[2:]), (first, *others), strict=True):
            assert answer.result().token_ids == alone(head, prompt, **NEW)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_whose_logits_are_no_numbers_ends_alone(spec, around, temperature):
    prompts = random_prompts(3)
    options = {"temperature": temperature, "seed": 4} | NEW

    def broken(forward, cache, trees, *_):
        outs = forward()
        if len(outs) == 3:
            outs[1].logits.fill_(float("nan"))
        return outs

    wanted = [alone(spec, prompt, **options) for prompt in prompts]
    around("forward_trees", broken)
    with Engine(spec, batch=3) as engine:
        _, go = held_up(engine, [5], max_new_tokens=1)
        answers = [engine.submit(prompt, **options) for prompt in prompts]
        go.set()
        with complains("not numbers"):
            list(answers[1])
        assert [answers[0].result().token_ids, answers[2].result().token_ids] == wanted[::2]


def test_an_error_of_the_models_ends_all_that_run_and_the_next_are_answered(spec, around):
    prompts = random_prompts(3)
    lost = Event()
    options = {"max_new_tokens": 40}

    def losing(forward, cache, trees, *_):
        if len(trees) == 2 and not lost.is_set():
            lost.set()
            raise RuntimeError("device lost")
        return forward()

    around("forward_trees", losing)
    with Engine(spec, batch=2) as engine:
        first, go = held_up(engine, prompts[0], **options)
        second, third = (engine.submit(prompt, **options) for prompt in prompts[1:])
        go.set()
        for answer in (first, second):
            with pytest.raises(RuntimeError, match="device lost"):
                answer.result()
        assert third.result().token_ids == alone(spec, prompts[2], **options)


def test_bad_input_is_refused_at_once(head):
    with Engine(head) as engine:
        for prompt, options, complaint in [
            ([], {}, "prompt is empty"),
            ([5], {"temperature": -1.0}, "temperature is -1.0"),
            ([5], {"warmth": 1.0}, "unknown option warmth"),
            ([5] * 128, {}, "the prompt has 128 tokens"),
        ]:
            with complains(complaint):
                engine.submit(prompt, **options)
        assert (engine.running, engine.waiting) == (0, 0)
    for name, limit in {"batch": 0, "queue": -1, "columns": 0}.items():
        with complains(f"{name} is"):
            Engine(head, **{name: limit})


@pytest.mark.parametrize("finish", [True, False])
def test_closing_answers_what_was_asked_or_ends_it_and_leaves_nothing(head, finish):
    before = held()
    prompts = random_prompts(3)
    engine = Engine(head, batch=2)
    first, go = held_up(engine, prompts[0], **NEW)
    others = [engine.submit(prompt, **NEW) for prompt in prompts[1:]]
    closing = threading.Thread(target=engine.close, args=(finish,))
    closing.start()
    while not engine._closed:
        pass
    with complains("the engine is closed"):
        engine.submit(prompts[0])
    go.set()
    closing.join(60)
    for prompt, answer in zip(prompts, (first, *others), strict=True):
        if finish:
            assert answer.result().token_ids == alone(head, prompt, **NEW)
        else:
            with complains("the engine was closed"):
                list(answer)
    engine.close()
    assert held() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_caller_waits_for_a_thread_that_is_gone(head, around):
    def ended(*_):
        raise SystemExit(3)

    around("forward_trees", ended)
    with Engine(head) as engine:
        answer = engine.submit([5], **NEW)
        with complains(r"the engine failed: SystemExit\(3\)"):
            answer.result()
        with complains("the engine is closed"):
            engine.submit([5])
