"""An engine in asyncio: answers of several tasks at once, their pieces, errors and cancellation."""

import asyncio

import pytest
from commands import complains
from models import join_tokens

from treespec.api.engine import Engine

PROMPTS = [[5, 9, 33], [9, 4, 30]]
LENGTH = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine(tiny, batch=2) as engine:
        yield engine


def test_two_tasks_get_their_own_answers_at_once(engine, tiny):
    async def ask():
        return await asyncio.gather(*(engine.generate(prompt, **LENGTH) for prompt in PROMPTS))

    answers = asyncio.run(ask())
    alone = tiny.new()
    assert [answer.token_ids for answer in answers] == [alone.generate(p, **LENGTH).token_ids for p in PROMPTS]


def test_the_pieces_of_a_stream_are_the_answer(engine, tiny):
    async def ask():
        stream = engine.stream(PROMPTS[0], **LENGTH)
        pieces = [piece async for piece in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return pieces, stream.output

    pieces, output = asyncio.run(ask())
    assert len(pieces) > 1
    assert join_tokens(pieces) == output.token_ids == tiny.new().generate(PROMPTS[0], **LENGTH).token_ids
    assert output.stats.new_tokens == LENGTH["max_new_tokens"]


def test_leaving_or_cancelling_a_task_ends_its_answer_alone(engine):
    async def ask():
        async with engine.stream(PROMPTS[0], max_new_tokens=4000) as stream:
            await anext(stream)
        task = asyncio.create_task(engine.generate(PROMPTS[0], max_new_tokens=4000))
        other = asyncio.create_task(engine.generate(PROMPTS[1], **LENGTH))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.running + engine.waiting:
            await asyncio.sleep(0.01)
        return len(stream.output.token_ids), await other

    shown, answer = asyncio.run(ask())
    assert shown < 4000
    assert answer.stats.new_tokens == LENGTH["max_new_tokens"]


def test_errors_reach_the_task_that_asked(engine):
    def fail(*_):
        raise ValueError("not today")

    async def ask(**options):
        await engine.generate(PROMPTS[0], **options)

    with complains("temperature is -1.0"):
        asyncio.run(ask(temperature=-1.0))
    with pytest.raises(Exception, match="not today"):
        asyncio.run(ask(on_cycle=fail))
