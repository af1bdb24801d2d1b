"""/v1/chat/completions: an answer to messages, whole or as a stream."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.requests.output import Answer
from treespec.serve import messages
from treespec.serve.answers import Answers
from treespec.serve.choice import choice_of
from treespec.serve.logprobs import Told, joined
from treespec.serve.options import fit_default, options_of
from treespec.serve.schema import ChatRequest
from treespec.serve.state import State, memory_of, state_of
from treespec.serve.tools import Call, Catcher, form_of
from treespec.serve.wire import Fields, end_of, events, heading, told_of, usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    # 1. What is asked, in treespec's terms.
    state = state_of(request)
    state.check_model(asked.model)
    options, choice = options_of(state, asked), choice_of(asked)
    options["memory"] = memory_of(request)
    if choice.schema is not None:
        options["json_schema"] = choice.schema
    variables = asked.chat_template_kwargs
    given = (state.spec, asked.messages, choice.tools, variables)
    answers = Answers(state)
    ids = await answers.tokenised(messages.encoded, *given)
    state.check_prompt(ids, "messages")
    fit_default(state, asked, options, [ids])

    # 2. The answers.
    samples = asked.n or 1
    await answers.submit([ids], samples, asked.seed, options)
    answers.watch(request)
    form = choice.form
    if choice.tools and form is None:
        form = form_of(messages.source_of(state.spec, choice.tools))
    most = 1 if asked.parallel_tool_calls is False else None
    parts = []
    for answer in answers.answers:
        catcher = Catcher(form, state.spec.target.tokenizer, most)
        parts.append(Part(answer, catcher, told_of(state, options, ids)))
    reply = Reply(state, asked, options, answers, parts)
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@final
@dataclass
class Part:
    """One of the choices. text, told: of the pieces so far."""

    answer: Answer
    catcher: Catcher
    logprobs: Told
    text: str = ""
    told: list[Fields | None] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@final
@dataclass
class Reply:
    """What is sent back. parts: the choices."""

    state: State
    asked: ChatRequest
    options: Fields
    answers: Answers
    parts: list[Part]

    def _end(self, part: Part) -> str:
        return "tool_calls" if part.calls else end_of(self.state, part.answer, self.options)

    async def whole(self) -> Fields:
        async for number, piece in self.answers.arrivals():
            part = self.parts[number]
            if piece:
                part.text += part.catcher.show(piece)
                part.told.append(part.logprobs.chat(piece))
            else:
                rest, part.calls = part.catcher.finish()
                part.text += rest
        choices = [self._choice(number, part) for number, part in enumerate(self.parts)]
        counts = usage(self.answers.answers)
        fields = heading(self.state, "chat.completion", "chatcmpl")
        return fields | {"choices": choices, "usage": counts}

    def _choice(self, number: int, part: Part) -> Fields:
        message: Fields = {"role": "assistant", "content": part.text, "refusal": None}
        if part.calls:
            message["content"] = part.text.strip() or None
            message["tool_calls"] = [_call(call) for call in part.calls]
        told = {"logprobs": joined(part.told), "finish_reason": self._end(part)}
        return {"index": number, "message": message} | told

    async def chunks(self) -> AsyncIterator[Fields | None]:
        # 1. The role of every choice.
        fields = heading(self.state, "chat.completion.chunk", "chatcmpl")
        counted = self.asked.counted
        fields |= {"usage": None} if counted else {}

        def chunk(number: int, delta: Fields, end: str | None = None, told: Any = None) -> Fields:
            choice = {"index": number, "delta": delta, "logprobs": told, "finish_reason": end}
            return fields | {"choices": [choice]}

        for number in range(len(self.parts)):
            yield chunk(number, {"role": "assistant", "content": "", "refusal": None})

        # 2. Pieces as they come, and the end of each choice.
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            number, piece = arrival
            part = self.parts[number]
            if piece:
                text, told = part.catcher.show(piece), part.logprobs.chat(piece)
                if text or told:
                    yield chunk(number, {"content": text}, told=told)
                continue
            rest, part.calls = part.catcher.finish()
            if rest:
                yield chunk(number, {"content": rest})
            for place, call in enumerate(part.calls):
                yield chunk(number, {"tool_calls": [{"index": place} | _call(call)]})
            yield chunk(number, {}, self._end(part))

        # 3. The counts.
        if counted:
            yield fields | {"choices": [], "usage": usage(self.answers.answers)}


def _call(call: Call) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
