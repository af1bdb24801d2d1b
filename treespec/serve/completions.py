"""/v1/completions: how prompts go on, whole or as a stream; /tokenize: their token ids."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.errors import InputError
from treespec.requests.output import Answer
from treespec.serve import messages
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, refused
from treespec.serve.logprobs import Told, joined
from treespec.serve.options import fit_default, options_of
from treespec.serve.schema import CompletionRequest, TokenizeRequest
from treespec.serve.state import State, memory_of, state_of
from treespec.serve.wire import Fields, end_of, events, heading, told_of, usage
from treespec.text.fitting import fitting
from treespec.text.prompts import well_formed

router = APIRouter()


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    # 1. What is asked, in treespec's terms.
    state = state_of(request)
    state.check_model(asked.model)
    options = options_of(state, asked) | {"memory": memory_of(request)}
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")
    prompts = prompts_of(asked)
    samples = asked.n or 1
    answers = Answers(state)
    ids = await answers.tokenised(_encoded, state, prompts)
    fit_default(state, asked, options, ids)

    # 2. The answers.
    await answers.submit(ids, samples, asked.seed, options)
    answers.watch(request)
    parts = []
    for number, answer in enumerate(answers.answers):
        place = number // samples
        echo = _text(state, prompts[place]) if asked.echo else ""
        parts.append(Part(answer, echo, told_of(state, options, ids[place], len(echo))))
    reply = Reply(state, asked, options, answers, parts, len(prompts))
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@router.post("/tokenize")
async def tokenize(request: Request, asked: TokenizeRequest) -> Fields:
    """The token ids of a prompt, or of messages as a chat begins an answer to them."""
    state = state_of(request)
    state.check_model(asked.model)
    tokenizer, length = state.spec.target.tokenizer, state.spec.target.context_length
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if tokenizer is None:
        raise ApiError(400, "the target has no tokenizer")
    if asked.messages is not None:
        ids = await Answers(state).tokenised(messages.encoded, state.spec, asked.messages)
    else:
        options = {"add_special_tokens": asked.add_special_tokens, "verbose": False}
        try:
            text = fitting(well_formed(asked.prompt or "", "the prompt"), tokenizer, length)
        except InputError as error:
            raise refused(error, "prompt") from error
        ids = await Answers(state).tokenised(partial(tokenizer.encode, text, **options))
    return {"tokens": ids, "count": len(ids), "max_model_len": length}


def prompts_of(asked: CompletionRequest) -> list[str | list[int]]:
    """Every prompt by itself: a list of numbers is one prompt."""
    given = asked.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise ApiError(400, "the prompt is empty: give text or token ids", "prompt")
    return list(cast(Sequence[str | list[int]], given))


def _encoded(state: State, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(state.spec.encode(prompt))
        except InputError as error:
            raise refused(error, "prompt") from error
        state.check_prompt(encoded[-1], "prompt")
    return encoded


def _text(state: State, prompt: str | list[int]) -> str:
    tokenizer = state.spec.target.tokenizer
    return prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt)) if tokenizer else ""


@final
@dataclass
class Part:
    """One of the choices. echo: its prompt, or "". told: of the pieces so far."""

    answer: Answer
    echo: str
    logprobs: Told
    told: list[Fields | None] = field(default_factory=list)


@final
@dataclass
class Reply:
    """What is sent back. parts: the choices. prompts: their number."""

    state: State
    asked: CompletionRequest
    options: Fields
    answers: Answers
    parts: list[Part]
    prompts: int

    async def whole(self) -> Fields:
        async for number, piece in self.answers.arrivals():
            if piece:
                part = self.parts[number]
                part.told.append(part.logprobs.completion(piece))
        choices = []
        for number, part in enumerate(self.parts):
            end = end_of(self.state, part.answer, self.options)
            fields = {"index": number, "text": part.echo + part.answer.output.text}
            choices.append(fields | {"logprobs": joined(part.told), "finish_reason": end})
        counts = usage(self.answers.answers, self.prompts)
        fields = heading(self.state, "text_completion", "cmpl")
        return fields | {"choices": choices, "usage": counts}

    async def chunks(self) -> AsyncIterator[Fields | None]:
        # 1. The echoes of the prompts.
        fields = heading(self.state, "text_completion", "cmpl")
        counted = self.asked.counted
        fields |= {"usage": None} if counted else {}

        def chunk(number: int, text: str, end: str | None = None, told: Any = None) -> Fields:
            choice = {"index": number, "text": text, "logprobs": told, "finish_reason": end}
            return fields | {"choices": [choice]}

        for number, part in enumerate(self.parts):
            if part.echo:
                yield chunk(number, part.echo)

        # 2. Pieces as they come, and the end of each choice.
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            number, piece = arrival
            part = self.parts[number]
            if piece is None:
                yield chunk(number, "", end_of(self.state, part.answer, self.options))
                continue
            told = part.logprobs.completion(piece)
            if piece.text or told:
                yield chunk(number, piece.text, told=told)

        # 3. The counts.
        if counted:
            counts = usage(self.answers.answers, self.prompts)
            yield fields | {"choices": [], "usage": counts}
