"""/v1/completions: how prompts go on, whole or as a stream; /tokenize: the token ids of a prompt."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from treespec.errors import InputError
from treespec.serve import logprobs, messages
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, refused
from treespec.serve.options import options_of
from treespec.serve.schema import CompletionRequest, TokenizeRequest
from treespec.serve.state import State, state_of
from treespec.serve.wire import Fields, end_of, events, heading, usage
from treespec.text.prompts import well_formed

router = APIRouter()


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    # 1. What is asked, in treespec's terms.
    state = state_of(request)
    state.check_model(asked.model)
    options = options_of(state, asked)
    if asked.suffix:
        raise ApiError(400, "suffix is not taken: answers follow the prompt", "suffix")
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")
    prompts = prompts_of(asked)
    samples = asked.n or 1
    ids = await run_in_threadpool(_encoded, state, prompts)

    # 2. The answers.
    answers = Answers(state)
    await answers.submit(ids, samples, asked.seed, options)
    answers.watch(request)
    echoed = [_text(state, prompt) if asked.echo else "" for prompt in prompts]
    before = [text for text in echoed for _ in range(samples)]
    reply = Reply(state, asked, options, answers, before, len(prompts))
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@router.post("/tokenize")
async def tokenize(request: Request, asked: TokenizeRequest) -> Fields:
    """The token ids of a prompt, or of messages as a chat begins an answer to them."""
    state = state_of(request)
    state.check_model(asked.model)
    tokenizer = state.spec.target.tokenizer
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if tokenizer is None:
        raise ApiError(400, "the target has no tokenizer")
    if asked.messages is not None:
        ids = await run_in_threadpool(messages.encoded, state.spec, asked.messages)
    else:
        try:
            text = well_formed(asked.prompt or "", "the prompt")
        except InputError as error:
            raise refused(error, "prompt") from error
        ids = tokenizer.encode(text, add_special_tokens=asked.add_special_tokens, verbose=False)
    length = state.spec.target.context_length
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
class Reply:
    """What is sent back. before: the echo of each choice's prompt. prompts: their number."""

    state: State
    asked: CompletionRequest
    options: Fields
    answers: Answers
    before: list[str]
    prompts: int

    async def whole(self) -> Fields:
        async for _ in self.answers.arrivals():
            pass
        choices = []
        for number, (answer, text) in enumerate(
            zip(self.answers.answers, self.before, strict=True)
        ):
            told = logprobs.of_completion(self.state, self.options, answer)
            end = end_of(self.state, answer, self.options)
            fields = {"index": number, "text": text + answer.output.text}
            choices.append(fields | {"logprobs": told, "finish_reason": end})
        counts = usage(self.answers.answers, self.prompts)
        fields = heading(self.state, "text_completion", "cmpl")
        return fields | {"choices": choices, "usage": counts}

    async def chunks(self) -> AsyncIterator[Fields | None]:
        fields = heading(self.state, "text_completion", "cmpl")
        options = self.asked.stream_options
        counted = bool(options and options.include_usage)
        if counted:
            fields["usage"] = None

        def chunk(number: int, text: str, end: str | None = None, told: Any = None) -> Fields:
            choice = {"index": number, "text": text, "logprobs": told, "finish_reason": end}
            return fields | {"choices": [choice]}

        for number, text in enumerate(self.before):
            if text:
                yield chunk(number, text)
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            number, piece = arrival
            if piece is None:
                end = end_of(self.state, self.answers.answers[number], self.options)
                yield chunk(number, "", end)
            else:
                told = logprobs.of_piece_completion(self.state, self.options, piece)
                if piece.text or told:
                    yield chunk(number, piece.text, told=told)
        if counted:
            counts = usage(self.answers.answers, self.prompts)
            yield fields | {"choices": [], "usage": counts}
