"""/v1/chat/completions, /v1/completions, and /tokenize: the token ids of a prompt."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.serve.answers import Answers, keep
from treespec.serve.errors import ApiError
from treespec.serve.messages import choice_of, encoded
from treespec.serve.replies import Fields, Reply, chat_choice, events, text_choice
from treespec.serve.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from treespec.serve.state import state_of
from treespec.serve.tools import Catcher, form_of
from treespec.text.pictures import has_pictures
from treespec.text.strings import fitting, well_formed
from treespec.text.templates import source_of

router = APIRouter()
USUAL = 16  # tokens of a text completion without max_tokens, as OpenAI's


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    # 1. Tools, and the form of their calls.
    state = state_of(request)
    tools, form, schema = choice_of(asked)
    if tools and form is None:
        spec = state.spec
        form = form_of(source_of(spec.target.tokenizer, spec.template, tools))
    most = 1 if asked.parallel_tool_calls is False else None

    # 2. The prompt.
    def encode() -> list[list[int]]:
        return [encoded(state.spec, asked.messages, tools, asked.chat_template_kwargs)]

    style = {
        "write": chat_choice,
        "names": ("chat.completion", "chat.completion.chunk", "chatcmpl"),
        "opening": [""],
        "catcher": partial(Catcher, form, state.spec.target.tokenizer, most),
    }
    options = asked.options() | ({} if schema is None else {"json_schema": schema})
    return await respond(request, asked, encode, style, options)


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    # 1. The prompts, as one list of them.
    state = state_of(request)
    given = asked.prompt
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")
    one = isinstance(given, str) or isinstance(given[0], int)  # a list of numbers is one
    prompts: Any = [given] if one else given

    # 2. Their tokens, and what answers begin with.
    def encode() -> list[list[int]]:
        return [state.spec.encode(prompt) for prompt in prompts]

    def echoed(prompt: Any) -> str:
        tokenizer = state.spec.target.tokenizer
        if isinstance(prompt, str):
            return prompt
        return str(tokenizer.decode(prompt)) if tokenizer else ""

    style = {
        "write": text_choice,
        "names": ("text_completion", "text_completion", "cmpl"),
        "opening": [echoed(prompt) if asked.echo else None for prompt in prompts],
        "catcher": partial(Catcher, None, None),
    }
    return await respond(request, asked, encode, style, asked.options())


async def respond(
    request: Request,
    asked: Sampled,
    encode: Callable[[], list[list[int]]],
    style: Fields,
    options: Fields,
) -> Response:
    """Answer a request to either endpoint, as a whole or as a stream. Raises ApiError.

    encode: gives the token ids of its prompts. style: the fields of `Reply` that the endpoint
    chooses. options: of `Spec.generate`.
    """
    # 1. The prompts.
    state = state_of(request)
    answers = Answers(state_of(request), request)
    state.check_model(asked.model)
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    prompts = await answers.run(encode, limiter=state.tokenising, param=param)
    for ids in prompts:
        state.check_prompt(ids, param)

    # 2. The most tokens of an answer. A chat without a limit takes what the engine's memory allows.
    most = state.config.max_tokens
    columns = state.engine.columns
    tokens = None
    for name in ("max_tokens", "max_completion_tokens"):  # the latter is OpenAI's since 2024
        value = getattr(asked, name, None)
        if value is not None:
            tokens = state.check_tokens(value, name)
    if tokens is None:
        room = most if columns is None else max(1, columns - max(map(len, prompts)))
        tokens = min(most, room, most if isinstance(asked, ChatRequest) else USUAL)

    # 3. The answers. OpenAI's `store` lets them be kept.
    folder = state.config.log_completions if getattr(asked, "store", None) else None
    if folder and not has_pictures(messages := cast(ChatRequest, asked).messages):
        file = Path(folder).expanduser() / f"{request.state.memory[:12] or 'anyone'}.jsonl"
        answers.keep = partial(keep, file, messages)
    options = {"temperature": state.config.temperature, **options, "max_new_tokens": tokens}
    options["memory"] = request.state.memory
    await answers.submit(prompts, asked.n or 1, asked.seed, options)
    counted = bool(asked.stream_options and asked.stream_options.include_usage)
    hidden = frozenset() if options.get("ignore_eos") else state.ends
    numbered = bool(asked.return_token_ids)
    reply = Reply(answers, counted=counted, hidden=hidden, numbered=numbered, **style)
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


@router.post("/tokenize")
async def tokenize(request: Request, asked: TokenizeRequest) -> Fields:
    """The token ids of a prompt, or of messages as a chat begins an answer to them."""
    state = state_of(request)
    answers = Answers(state_of(request), request)
    state.check_model(asked.model)
    tokenizer = state.spec.target.tokenizer
    length = state.spec.target.context_length
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if tokenizer is None:
        raise ApiError(400, "the target has no tokenizer")

    def encode() -> list[int]:
        if asked.messages is not None:
            return encoded(state.spec, asked.messages)
        text = fitting(well_formed(asked.prompt or "", "the prompt"), tokenizer, length)
        return tokenizer.encode(text, add_special_tokens=asked.add_special_tokens, verbose=False)

    param = "prompt" if asked.messages is None else "messages"
    ids = await answers.run(encode, limiter=state.tokenising, param=param)
    return {"tokens": ids, "count": len(ids), "max_model_len": length}
