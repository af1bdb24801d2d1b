"""/v1/chat/completions: an answer to messages, whole or as a stream."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, final

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from treespec.serve import logprobs, messages
from treespec.serve.answers import Answers
from treespec.serve.options import options_of
from treespec.serve.schema import ChatRequest
from treespec.serve.state import State, state_of
from treespec.serve.tools import Call, Catcher, form_of
from treespec.serve.wire import Fields, end_of, events, heading, usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    # 1. What is asked, in treespec's terms.
    state = state_of(request)
    state.check_model(asked.model)
    options = options_of(state, asked)
    tools = messages.offered(asked)
    extra = asked.chat_template_kwargs
    ids = await run_in_threadpool(messages.encoded, state.spec, asked.messages, tools, extra)
    state.check_prompt(ids, "messages")

    # 2. The answers.
    answers = Answers(state)
    await answers.submit([ids], asked.n or 1, asked.seed, options)
    answers.watch(request)
    form = form_of(messages.source_of(state.spec, tools)) if tools else None
    catchers = [Catcher(form, state.spec.target.tokenizer) for _ in range(asked.n or 1)]
    reply = Reply(state, asked, options, answers, catchers)
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@final
@dataclass
class Reply:
    """What is sent back. catchers: one for each choice."""

    state: State
    asked: ChatRequest
    options: Fields
    answers: Answers
    catchers: list[Catcher]

    async def whole(self) -> Fields:
        texts = [""] * len(self.catchers)
        choices: dict[int, Fields] = {}
        async for number, piece in self.answers.arrivals():
            if piece:
                texts[number] += self.catchers[number].show(piece)
                continue
            rest, calls = self.catchers[number].finish()
            choices[number] = self._choice(number, texts[number] + rest, calls)
        fields = heading(self.state, "chat.completion", "chatcmpl")
        ordered = [choices[number] for number in range(len(texts))]
        return fields | {"choices": ordered, "usage": usage(self.answers.answers)}

    def _choice(self, number: int, text: str, calls: list[Call]) -> Fields:
        answer = self.answers.answers[number]
        message: Fields = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": number,
            "message": message,
            "logprobs": logprobs.of_chat(self.state, self.options, answer.output.token_ids, answer),
            "finish_reason": "tool_calls" if calls else end_of(self.state, answer, self.options),
        }

    async def chunks(self) -> AsyncIterator[Fields | None]:
        # 1. The role of every choice.
        fields = heading(self.state, "chat.completion.chunk", "chatcmpl")
        options = self.asked.stream_options
        counted = bool(options and options.include_usage)
        if counted:
            fields["usage"] = None

        def chunk(number: int, delta: Fields, end: str | None = None, **more: Any) -> Fields:
            choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": end}
            return fields | {"choices": [choice | more]}

        for number in range(len(self.catchers)):
            yield chunk(number, {"role": "assistant", "content": "", "refusal": None})

        # 2. Pieces as they come, and the end of each choice.
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            number, piece = arrival
            answer, catcher = self.answers.answers[number], self.catchers[number]
            if piece:
                text = catcher.show(piece)
                told = logprobs.of_piece(self.state, self.options, piece)
                if text or told:
                    yield chunk(number, {"content": text}, logprobs=told)
                continue
            rest, calls = catcher.finish()
            if rest:
                yield chunk(number, {"content": rest})
            for place, call in enumerate(calls):
                yield chunk(number, {"tool_calls": [{"index": place} | _call(call)]})
            end = "tool_calls" if calls else end_of(self.state, answer, self.options)
            yield chunk(number, {}, end)

        # 3. The counts.
        if counted:
            yield fields | {"choices": [], "usage": usage(self.answers.answers)}


def _call(call: Call) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
