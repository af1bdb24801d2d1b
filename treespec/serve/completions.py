"""/v1/chat/completions, /v1/completions, and /tokenize: the token ids of a prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.errors import InputError
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, refused
from treespec.serve.messages import choice_of, encoded, source_of
from treespec.serve.replies import Fields, Reply, chat_choice, events, text_choice
from treespec.serve.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from treespec.serve.state import State, memory_of, state_of
from treespec.serve.tools import Catcher, form_of
from treespec.text.strings import fitting, well_formed

router = APIRouter()
USUAL = 16  # tokens of a text completion without max_tokens, as OpenAI's


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    # 1. Tools, and the form of their calls.
    state = state_of(request)
    tools, form, schema = choice_of(asked)
    if tools and form is None:
        form = form_of(source_of(state.spec, tools))
    most = 1 if asked.parallel_tool_calls is False else None

    # 2. The prompt.
    def encode() -> list[list[int]]:
        variables = asked.chat_template_kwargs
        ids = encoded(state.spec, asked.messages, tools, variables)
        state.check_prompt(ids, "messages")
        return [ids]

    answers = await begun(request, asked, encode, {} if schema is None else {"json_schema": schema})
    return await sent(
        asked,
        answers,
        write=chat_choice,
        names=("chat.completion", "chat.completion.chunk", "chatcmpl"),
        opening=[""],
        catcher=partial(Catcher, form, state.spec.target.tokenizer, most),
    )


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    # 1. The prompts, as one list of them.
    state, given = state_of(request), asked.prompt
    if not given:
        raise ApiError(400, "the prompt is empty: give text or token ids", "prompt")
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")
    one = isinstance(given, str) or isinstance(given[0], int)  # a list of numbers is one
    prompts: Any = [given] if one else given

    # 2. Their tokens, and what answers begin with.
    def encode() -> list[list[int]]:
        ids: list[list[int]] = []
        for prompt in prompts:
            try:
                ids.append(state.spec.encode(prompt))
            except InputError as error:
                raise refused(error, "prompt") from error
            state.check_prompt(ids[-1], "prompt")
        return ids

    def echoed(prompt: Any) -> str | None:
        tokenizer = state.spec.target.tokenizer
        if isinstance(prompt, str) or not (asked.echo and tokenizer):
            return prompt if asked.echo else None
        return str(tokenizer.decode(prompt))

    return await sent(
        asked,
        await begun(request, asked, encode, {}, USUAL),
        write=text_choice,
        names=("text_completion", "text_completion", "cmpl"),
        opening=[echoed(prompt) for prompt in prompts],
        catcher=partial(Catcher, None, None),
    )


async def begun(
    request: Request,
    asked: Sampled,
    encode: Callable[[], list[list[int]]],
    more: Fields,
    usual: int | None = None,
) -> Answers:
    """The answers to a request, submitted. Raises ApiError.

    encode: gives the token ids of its prompts. more: further options. usual: tokens of an answer
    without a limit of the request; None: as many as the server and the engine's memory allow.
    """
    state, answers = state_of(request), Answers(state_of(request), request)
    state.check_model(asked.model)
    prompts = await answers.tokenised(encode)
    options = {"temperature": state.config.temperature} | asked.options() | more
    options |= {"max_new_tokens": limit_of(state, asked, prompts, usual)}
    options["memory"] = memory_of(request)
    await answers.submit(prompts, asked.n or 1, asked.seed, options)
    return answers


def limit_of(
    state: State, asked: Sampled, prompts: Sequence[Sequence[int]], usual: int | None
) -> int:
    """The most tokens of an answer. Raises ApiError where the server's limit is less."""
    tokens = None
    for name in ("max_tokens", "max_completion_tokens"):  # the latter is OpenAI's since 2024
        if (value := getattr(asked, name, None)) is not None:
            tokens = state.check_tokens(value, name)
    if tokens is None:
        most, columns = state.config.max_tokens, state.engine.columns
        tokens = min(usual or most, most)
        if columns is not None:
            tokens = max(1, min(tokens, columns - max(map(len, prompts))))
    return tokens


async def sent(asked: ChatRequest | CompletionRequest, answers: Answers, **style: Any) -> Response:
    """The response, as a whole or as a stream. style: the fields of `Reply` of the endpoint."""
    given = asked.model_extra or {}
    hidden = frozenset() if given.get("ignore_eos") else answers.state.ends
    reply = Reply(answers, counted=asked.counted, hidden=hidden, **style)
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@router.post("/tokenize")
async def tokenize(request: Request, asked: TokenizeRequest) -> Fields:
    """The token ids of a prompt, or of messages as a chat begins an answer to them."""
    state, answers = state_of(request), Answers(state_of(request), request)
    state.check_model(asked.model)
    tokenizer, length = state.spec.target.tokenizer, state.spec.target.context_length
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if tokenizer is None:
        raise ApiError(400, "the target has no tokenizer")
    if asked.messages is not None:
        ids = await answers.tokenised(encoded, state.spec, asked.messages)
    else:
        options = {"add_special_tokens": asked.add_special_tokens, "verbose": False}
        try:
            text = fitting(well_formed(asked.prompt or "", "the prompt"), tokenizer, length)
        except InputError as error:
            raise refused(error, "prompt") from error
        ids = await answers.tokenised(partial(tokenizer.encode, text, **options))
    return {"tokens": ids, "count": len(ids), "max_model_len": length}
