"""Callers of an engine take turns, a request may bring a Spec of its own, and errors end what they must."""

from threading import Event
from types import SimpleNamespace

import pytest
from commands import complains
from models import random_head, random_prompts, target

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.engine.batch import order_by_turns

NEW = {"max_new_tokens": 12}


def alone(spec, prompt):
    return spec.new().generate(prompt, **NEW).token_ids


@pytest.fixture(scope="module")
def head():
    return Spec(target("llama"), random_head(target("llama")), "2x2")


def test_an_error_of_any_kind_ends_the_requests_that_run(head):
    def ended(*_):
        raise SystemExit(3)

    with Engine(head) as engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("treespec.engine.decoder.forward_trees", ended)
            answer = engine.submit([5], **NEW)
            with complains(r"the engine failed: SystemExit\(3\)"):
                answer.result()
        assert engine.submit([5], **NEW).result().token_ids == alone(head, [5])
        assert engine.failure is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_caller_waits_for_a_thread_that_is_gone(head, monkeypatch):
    def ended(*_):
        raise SystemExit(3)

    with Engine(head) as engine:
        monkeypatch.setattr("treespec.api.engine.pop_admissible", ended)
        answer = engine.submit([5], **NEW)
        with complains(r"the engine failed: SystemExit\(3\)"):
            answer.result()
        with complains("the engine is closed"):
            engine.submit([5])
        assert engine.failure == "the engine failed: SystemExit(3)"


def test_callers_enter_the_batch_in_turns(head):
    """One caller's seven requests wait; another's enters after the first of them to end."""
    prompts = random_prompts(8)
    ends = []
    with Engine(head, batch=2) as engine:
        go = Event()
        engine.submit(prompts[0], caller="a", on_piece=lambda piece: go.wait(60), **NEW)
        answers = []
        for number, prompt in enumerate(prompts):
            caller = "b" if number == 7 else "a"

            def listen(piece, number=number):
                if piece is None:
                    ends.append(number)

            answers.append(engine.submit(prompt, caller=caller, on_piece=listen, **NEW))
        go.set()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result().token_ids == alone(head, prompt)
    assert ends.index(7) < 3


def test_the_caller_with_the_fewest_running_requests_is_next():
    """As `order_by_turns` draws it."""

    def request(name):
        return SimpleNamespace(caller=name[0], name=name)

    waiting = map(request, ["a1", "a2", "b1", "a3", "b2", "c1"])
    ordered = order_by_turns(waiting, [request("a8"), request("a9")], {"a": 4})
    assert [one.name for one in ordered] == ["b1", "c1", "b2", "a1", "a2", "a3"]


def test_a_request_with_a_spec_of_its_own_is_decoded_beside_the_others(head):
    prompt = random_prompts(1)[0]
    plain = head.baseline()
    with Engine(head) as engine:
        answers = [engine.submit(prompt, spec=spec, **NEW) for spec in (None, plain, head.baseline(), None)]
        for answer in answers:
            assert answer.result().token_ids == alone(head, prompt)
        assert answers[1].stats.cycles == len(answers[1].output.token_ids)
