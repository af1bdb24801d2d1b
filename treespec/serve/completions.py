"""The endpoints /v1/chat/completions, /v1/completions and /tokenize."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.files.pauses import take_pause
from treespec.serve.answers import Answers, keep
from treespec.serve.bodies import read_body
from treespec.serve.echoes import build_echo_reply, score_prompts
from treespec.serve.errors import ApiError
from treespec.serve.messages import encode_request, list_schemas, parse_tool_choice
from treespec.serve.protocol import Fields, build_chat_choice, build_text_choice, write_reply
from treespec.serve.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from treespec.serve.state import State, get_state
from treespec.serve.streaming import Reply, ReplyFormat, stream_events
from treespec.serve.thought_grammar import place_after_thought
from treespec.serve.thoughts import (
    ThoughtFormat,
    ThoughtState,
    detect_thought_form,
    find_thought_state,
)
from treespec.serve.tool_forms import detect_tool_form
from treespec.serve.tools import AnswerForm, AnswerParser
from treespec.text import pieces
from treespec.text.pictures import has_pictures
from treespec.text.strings import check_fits_context, require_well_formed
from treespec.text.templates import get_template_source

router = APIRouter()
PROMPT_END_TOKENS = 32  # decoded to see whether the prompt opens a thought
DEFAULT_COMPLETION_TOKENS = 16  # tokens of a text completion without max_tokens, as in OpenAI's API


@dataclass(frozen=True)
class ChatPlan:
    """How a conversation is answered.

    Attributes:
        prompt: its token ids.
        form: how thoughts and calls are read.
        options: keywords of `Spec.generate` that the request sets.
    """

    prompt: list[int]
    form: AnswerForm
    options: Fields


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    reply = await begin_chat(request, body)
    return await send_reply(reply, body)


async def begin_chat(request: Request, body: ChatRequest) -> Reply:
    """Begin to answer a conversation. Raises ApiError."""
    answers = Answers(request)
    state = answers.state
    state.check_model(body.model)
    await answers.admit_pictures(body.messages)
    plan = await answers.run(partial(plan_chat, state, body), "messages")
    reply_format = ReplyFormat(
        build_choice=build_chat_choice,
        object_name="chat.completion",
        chunk_name="chat.completion.chunk",
        id_prefix="chatcmpl",
        openings=[""],
        build_parser=partial(build_parser, plan.form, state.spec.target.tokenizer),
        thoughts=plan.form.thoughts,
    )
    if body.store:
        log_answers(answers, body)
    return await begin_reply(answers, body, [plan.prompt], reply_format, plan.options)


def plan_chat(state: State, body: ChatRequest) -> ChatPlan:
    """Read the tools of a conversation, and encode it. Raises InputError, ApiError."""
    # 1. The tools, and how thoughts and calls are read.
    spec = state.spec
    choice = parse_tool_choice(body)
    source = get_template_source(spec.target.tokenizer, spec.template, choice.tools)
    tool_form = choice.form
    if choice.tools and tool_form is None:
        tool_form = detect_tool_form(source)
    max_calls = None
    if body.parallel_tool_calls is False:
        max_calls = 1
    form = AnswerForm(tool_form, detect_thought_form(source), list_schemas(choice.tools), max_calls)
    options = body.to_options()
    if choice.schema is not None:
        options["json_schema"] = choice.schema

    # 2. The prompt.
    prompt = encode_request(spec, body.messages, choice.tools, body.template_variables)
    state.check_prompt(prompt, "messages")
    return ChatPlan(prompt, form, options)


@router.post("/v1/completions")
async def complete(request: Request) -> Response:
    """Continue texts or token ids."""
    # 1. List the prompts, and encode them.
    body = await read_body(request, CompletionRequest)
    answers = Answers(request)
    state = answers.state
    state.check_model(body.model)
    prompts = unpack_prompts(body)
    ids = await answers.run(partial(encode_completions, state, prompts), "prompt")

    # 2. With `echo` an answer begins with its prompt.
    openings: list[str | None] = [None] * len(prompts)
    prompt_tokens = None
    if body.echo:
        openings = await answers.run(partial(decode_prompts, state.spec.target.tokenizer, prompts))
        if body.logprobs is not None:
            prompt_tokens = await score_prompts(answers, ids, body.logprobs)
    if body.max_tokens == 0:
        build = partial(
            build_echo_reply, state.name, ids, openings, prompt_tokens, samples=body.sample_count
        )
        if body.stream:
            return stream_events(stream_one(build()))
        return await write_response(answers, build)

    # 3. Answer.
    reply_format = ReplyFormat(
        build_choice=build_text_choice,
        object_name="text_completion",
        chunk_name="text_completion",
        id_prefix="cmpl",
        openings=openings,
        build_parser=partial(build_parser, AnswerForm(), None),
        prompt_tokens=prompt_tokens,
    )
    reply = await begin_reply(answers, body, ids, reply_format, body.to_options())
    return await send_reply(reply, body)


def unpack_prompts(body: CompletionRequest) -> list[Any]:
    """List the prompts of a request: texts, or lists of token ids. Raises ApiError if there are none."""
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens may be 0 only with echo", "max_tokens")
    if body.prompt == []:
        raise ApiError(400, "the prompt is an empty list: give text or token ids", "prompt")
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):  # one text, or its ids
        return [body.prompt]
    return list(body.prompt)


def encode_completions(state: State, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Encode the prompts of /v1/completions, and check their lengths. Raises InputError, ApiError."""
    encoded = []
    for prompt in prompts:
        take_pause()
        ids = encode_completion(state.spec, prompt)
        state.check_prompt(ids, "prompt")
        encoded.append(ids)
    return encoded


def encode_completion(spec: Spec, prompt: str | list[int]) -> list[int]:
    """Encode a prompt of /v1/completions; "" is the start token. Raises InputError if the target has none."""
    if prompt != "":
        return spec.encode(prompt)
    start = getattr(spec.target.tokenizer, "bos_token_id", None)
    if start is None:
        raise InputError("the prompt is empty, and the target has no start token: give text")
    return [start]


async def stream_one(fields: Fields) -> AsyncIterator[Fields]:
    """Yield the only chunk of a stream."""
    yield fields


def build_parser(form: AnswerForm, tokenizer: Any, prompt: Sequence[int]) -> AnswerParser:
    """Build the parser of an answer. prompt: the token ids of its prompt, which may open a thought."""
    state = read_thought_state(form.thoughts, tokenizer, prompt)
    return AnswerParser(form, tokenizer, thinking=state == "open")


def read_thought_state(
    form: ThoughtFormat | None, tokenizer: Any, prompt: Sequence[int]
) -> ThoughtState:
    """Whether a prompt, given as token ids, has opened the thought of the answer, or closed it."""
    if form is None or tokenizer is None:
        return "none"
    return find_thought_state(form, str(tokenizer.decode(prompt[-PROMPT_END_TOKENS:])))


def decode_prompts(tokenizer: Any, prompts: Sequence[str | list[int]]) -> list[str | None]:
    """The texts of prompts; "" for token ids without a tokenizer."""
    texts = list[str | None]()
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
        elif tokenizer is None:
            texts.append("")
        else:
            texts.append(str(tokenizer.decode(prompt)))
    return texts


async def begin_reply(
    answers: Answers,
    body: Sampled,
    prompts: Sequence[Sequence[int]],
    reply_format: ReplyFormat,
    options: Fields,
) -> Reply:
    """Submit the answers to a request of either completion endpoint.

    Args:
        answers: of the HTTP request.
        body: the validated body of the request.
        prompts: token ids of each prompt.
        reply_format: how the endpoint writes its response.
        options: keywords of `Spec.generate` that the body sets.

    Raises: ApiError.
    """
    # 1. Submit the answers.
    state = answers.state
    options = {"temperature": state.config.temperature} | options
    options["max_new_tokens"] = choose_max_tokens(state, body, prompts)
    options["memory"] = answers.request.state.memory
    tokenizer = state.spec.target.tokenizer
    after_thought = None
    if reply_format.thoughts is not None and tokenizer is not None:
        after_thought = partial(
            place_after_thought,
            form=reply_format.thoughts,
            state=read_thought_state(reply_format.thoughts, tokenizer, prompts[0]),
            added_tokens=tokenizer.get_added_vocab(),
        )
    await answers.submit(prompts, body.sample_count, body.first_seed, options, after_thought)

    # 2. What the response tells.
    include_usage = False
    if body.stream_options is not None:
        include_usage = bool(body.stream_options.include_usage)
    hidden_tokens = state.ends
    if options.get("ignore_eos") or reply_format.prompt_tokens is not None:
        hidden_tokens = frozenset()
    return_token_ids = bool(body.return_token_ids)
    return Reply(answers, reply_format, include_usage, return_token_ids, hidden_tokens)


async def send_reply(reply: Reply, body: ChatRequest | CompletionRequest) -> Response:
    """Send the response to a request, as one object or as a stream. Raises ApiError."""
    if body.stream:
        return stream_events(reply.stream_chunks())
    if not body.logprobs:
        return JSONResponse(await reply.collect_reply())
    deltas = await reply.collect_deltas()
    return await write_response(reply.answers, partial(reply.build_reply, deltas))


async def write_response(answers: Answers, build: Callable[[], Fields]) -> Response:
    """Build a response that may hold many log-probabilities, and write it, on a thread. Raises ApiError."""
    content = await answers.run(lambda: write_reply(build()))
    return Response(content, media_type="application/json")


def choose_max_tokens(state: State, body: Sampled, prompts: Sequence[Sequence[int]]) -> int:
    """Choose the maximum number of tokens of an answer.

    A chat without a limit may fill the engine's cache, up to the server's limit. What exceeds either is cut, as vLLM
    does.
    """
    max_tokens = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    if max_tokens is None and not isinstance(body, ChatRequest):
        max_tokens = DEFAULT_COMPLETION_TOKENS
    limit = state.config.max_tokens
    columns = state.engine.columns
    if columns is not None:
        longest = max(len(ids) for ids in prompts)
        limit = min(limit, max(1, columns - longest))
    if max_tokens is None:
        return limit
    return min(max_tokens, limit)


def log_answers(answers: Answers, body: ChatRequest) -> None:
    """Log finished answers to the client's file in the folder of --log-completions, if that option is set.

    Chats with pictures are not logged.
    """
    folder = answers.state.config.log_completions
    if folder and not has_pictures(body.messages):
        client = answers.request.state.memory[:12] or "anyone"
        file = Path(folder).expanduser() / f"{client}.jsonl"
        answers.keep = partial(keep, file, body.messages)


@router.post("/tokenize")
async def tokenize(request: Request) -> Fields:
    """Answer with the token ids of a prompt, or of messages with the generation prompt."""
    body = await read_body(request, TokenizeRequest)
    state = get_state(request)
    answers = Answers(request)
    state.check_model(body.model)
    spec = state.spec
    encode: Callable[[], list[int]]
    if body.messages is not None and body.prompt is None:
        param = "messages"
        await answers.admit_pictures(body.messages)
        encode = partial(encode_request, spec, body.messages)
    elif body.prompt is not None and body.messages is None:
        param = "prompt"
        encode = partial(encode_tokenize_text, spec, body.prompt, body.add_special_tokens)
    else:
        raise ApiError(400, "give either prompt or messages", "prompt")
    if spec.target.tokenizer is None:
        raise ApiError(400, "the target has no tokenizer")
    ids = await answers.run(encode, param)
    return {"tokens": ids, "count": len(ids), "max_model_len": spec.target.context_length}


def encode_tokenize_text(spec: Spec, text: str, add_special_tokens: bool) -> list[int]:
    """Encode a text. Raises InputError if the text is too long or no valid Unicode."""
    tokenizer: Any = spec.target.tokenizer
    check_fits_context(
        require_well_formed(text, "the prompt"), tokenizer, spec.target.context_length
    )
    return pieces.encode_text(tokenizer, text, add_special_tokens)
