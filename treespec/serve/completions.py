"""/v1/chat/completions, /v1/completions, and /tokenize: the token ids of a prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from fastapi import APIRouter, Request, Response

from treespec.errors import InputError
from treespec.requests.output import Completion
from treespec.serve import messages
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, refused
from treespec.serve.logprobs import LogprobWriter
from treespec.serve.replies import ChatReply, Fields, Part, Reply
from treespec.serve.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from treespec.serve.state import State, memory_of, state_of
from treespec.serve.tools import Catcher, choice_of, form_of
from treespec.text import templates
from treespec.text.prompts import well_formed
from treespec.text.strings import fitting

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    state, choice = state_of(request), choice_of(asked)
    form = choice.form
    if choice.tools and form is None:
        form = form_of(messages.source_of(state.spec, choice.tools))
    most = 1 if asked.parallel_tool_calls is False else None
    begin = {"role": "assistant", "content": "", "refusal": None}

    def encode() -> list[list[int]]:
        variables = asked.chat_template_kwargs
        ids = messages.encoded(state.spec, asked.messages, choice.tools, variables)
        state.check_prompt(ids, "messages")
        return [ids]

    def part(answer: Completion, told: LogprobWriter, _: int) -> Part:
        return Part(answer, Catcher(form, state.spec.target.tokenizer, most), told.chat, begin)

    more = {} if choice.schema is None else {"json_schema": choice.schema}
    return await _respond(request, asked, encode, part, ChatReply, more)


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    state, prompts = state_of(request), prompts_of(asked)
    if asked.echo and asked.logprobs is not None:
        raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")

    def encode() -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            try:
                encoded.append(state.spec.encode(prompt))
            except InputError as error:
                raise refused(error, "prompt") from error
            state.check_prompt(encoded[-1], "prompt")
        return encoded

    def part(answer: Completion, told: LogprobWriter, place: int) -> Part:
        prompt, tokenizer = prompts[place], state.spec.target.tokenizer
        echo = ""
        if asked.echo and (tokenizer or isinstance(prompt, str)):
            echo = prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt))
        told.offset = len(echo)
        return Part(answer, Catcher(None, None), told.completion, echo)

    return await _respond(request, asked, encode, part, Reply, {})


async def _respond(
    request: Request,
    asked: Sampled,
    encode: Callable[[], list[list[int]]],
    part: Callable[[Completion, LogprobWriter, int], Part],
    reply: type[Reply],
    options: Fields,
) -> Response:
    """encode: the prompts' token ids. part: the choice of an answer to the prompt with a number.

    options: those of `Spec.generate` that the fields of `Sampled` do not name.
    """
    # 1. What is asked, in treespec's terms.
    state = state_of(request)
    state.check_model(asked.model)
    answers = Answers(state)
    prompts = await answers.tokenised(encode)
    options = _options(state, asked, prompts) | options | {"memory": memory_of(request)}

    # 2. The answers.
    samples = asked.n or 1
    await answers.submit(prompts, samples, asked.seed, options)
    answers.watch(request)
    target, template = state.spec.target, templates.stops(state.spec.template)
    hidden = frozenset() if asked.ignore_eos else target.eos | set(template.token_ids)
    parts = []
    for number, answer in enumerate(answers.answers):
        place = number // samples
        told = LogprobWriter(target.tokenizer, prompts[place][-1], hidden)
        parts.append(part(answer, told, place))
    return await reply(state, asked, answers, parts, len(prompts)).send()


def _options(state: State, asked: Sampled, prompts: Sequence[Sequence[int]]) -> Fields:
    """The options of one answer, without its seed. Raises ApiError for a limit of the server.

    Without a limit of the request, the answer is as long as the server and the engine's memory allow.
    """
    name, tokens = asked.limit
    if tokens is not None:
        state.check_tokens(tokens, name)
    else:
        tokens = min(asked.usual_tokens or state.limits.tokens, state.limits.tokens)
        if (columns := state.engine.columns) is not None:
            tokens = max(1, min(tokens, columns - max(map(len, prompts))))
    return {"temperature": state.temperature, "max_new_tokens": tokens} | asked.options()


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
