"""/v1/chat/completions, /v1/completions, and /tokenize: the token ids of a prompt."""

from collections.abc import Sequence
from functools import partial
from typing import Any, final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from treespec.errors import InputError
from treespec.serve import messages
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, refused
from treespec.serve.replies import Delta, Fields, Reply, events
from treespec.serve.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from treespec.serve.state import State, memory_of, state_of
from treespec.serve.tools import Catcher, choice_of, form_of
from treespec.text.strings import fitting, well_formed

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, asked: ChatRequest) -> Response:
    return await respond(request, Chat(state_of(request), asked))


@router.post("/v1/completions")
async def complete(request: Request, asked: CompletionRequest) -> Response:
    return await respond(request, Text(state_of(request), asked))


@final
class Chat:
    """A request to /v1/chat/completions, and how its response is written."""

    names = ("chat.completion", "chat.completion.chunk", "chatcmpl")

    def __init__(self, state: State, asked: ChatRequest) -> None:
        self.state, self.asked = state, asked
        self.tools, form, schema = choice_of(asked)
        taught = self.tools and form is None
        self.form = form_of(messages.source_of(state.spec, self.tools)) if taught else form
        self.options: Fields = {} if schema is None else {"json_schema": schema}

    def encode(self) -> list[list[int]]:
        given, variables = self.asked.messages, self.asked.chat_template_kwargs
        ids = messages.encoded(self.state.spec, given, self.tools, variables)
        self.state.check_prompt(ids, "messages")
        return [ids]

    def begin(self, index: int, place: int) -> Delta:
        return Delta(index, "", begins=True)

    def catcher(self) -> Catcher:
        most = 1 if self.asked.parallel_tool_calls is False else None
        return Catcher(self.form, self.state.spec.target.tokenizer, most)

    def fields(self, delta: Delta, whole: bool) -> Fields:
        calls, told = list(delta.calls), delta.tokens
        written: Fields = {"role": "assistant"} if whole or delta.begins else {}
        written |= {} if delta.text is None else {"content": delta.text}
        written |= {"refusal": None} if whole or delta.begins else {}
        if calls and whole:
            written |= {"content": (delta.text or "").strip() or None, "tool_calls": calls}
        elif calls:
            written["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        fields = {"index": delta.index, "message" if whole else "delta": written}
        fields["logprobs"] = None if told is None else {"content": told, "refusal": None}
        return fields | {"finish_reason": delta.end}


@final
class Text:
    """A request to /v1/completions, and how its response is written.

    offsets: characters of each choice so far, for those of the log-probabilities.
    """

    names = ("text_completion", "text_completion", "cmpl")

    def __init__(self, state: State, asked: CompletionRequest) -> None:
        self.state, self.asked, given = state, asked, asked.prompt
        if not given:
            raise ApiError(400, "the prompt is empty: give text or token ids", "prompt")
        if asked.echo and asked.logprobs is not None:
            raise ApiError(400, "echo goes without logprobs: prompts are not scored", "echo")
        one = isinstance(given, str) or isinstance(given[0], int)  # a list of numbers is one
        self.prompts: Any = [given] if one else given
        self.options: Fields = {}
        self.offsets: dict[int, int] = {}

    def encode(self) -> list[list[int]]:
        encoded = []
        for prompt in self.prompts:
            try:
                encoded.append(self.state.spec.encode(prompt))
            except InputError as error:
                raise refused(error, "prompt") from error
            self.state.check_prompt(encoded[-1], "prompt")
        return encoded

    def begin(self, index: int, place: int) -> Delta | None:
        prompt, tokenizer = self.prompts[place], self.state.spec.target.tokenizer
        if not self.asked.echo or not (tokenizer or isinstance(prompt, str)):
            return None
        return Delta(index, prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt)))

    def catcher(self) -> Catcher:
        return Catcher(None, None)

    def fields(self, delta: Delta, whole: bool) -> Fields:
        fields: Fields = {"index": delta.index, "text": delta.text or "", "logprobs": None}
        if (told := delta.tokens) is not None:
            tops = [token["top_logprobs"] for token in told]
            fields["logprobs"] = {
                "tokens": [token["token"] for token in told],
                "token_logprobs": [token["logprob"] for token in told],
                "top_logprobs": [{top["token"]: top["logprob"] for top in of} for of in tops],
                "text_offset": [self._offset(delta.index, token["token"]) for token in told],
            }
        return fields | {"finish_reason": delta.end}

    def _offset(self, index: int, text: str) -> int:
        start = self.offsets.get(index, 0)
        self.offsets[index] = start + len(text)
        return start


async def respond(request: Request, form: Chat | Text) -> Response:
    """Answer a request to either endpoint, as a whole or as a stream."""
    # 1. What is asked, in treespec's terms.
    state, asked = form.state, form.asked
    state.check_model(asked.model)
    answers = Answers(state, request)
    prompts = await answers.tokenised(form.encode)
    options = _options(state, asked, prompts) | form.options | {"memory": memory_of(request)}

    # 2. The answers.
    await answers.submit(prompts, asked.n or 1, asked.seed, options)
    hidden = frozenset() if asked.ignore_eos else state.ends
    reply = Reply(form, answers, prompts, hidden)
    return events(reply.chunks()) if asked.stream else JSONResponse(await reply.whole())


def _options(state: State, asked: Sampled, prompts: Sequence[Sequence[int]]) -> Fields:
    """The options of one answer, without its seed. Raises ApiError for a limit of the server.

    Without a limit of the request, the answer is as long as the server and the engine's memory allow.
    """
    name, tokens = asked.limit
    if tokens is not None:
        state.check_tokens(tokens, name)
    else:
        most = state.config.max_tokens
        tokens = min(asked.usual_tokens or most, most)
        if (columns := state.engine.columns) is not None:
            tokens = max(1, min(tokens, columns - max(map(len, prompts))))
    usual = {"temperature": state.config.temperature, "max_new_tokens": tokens}
    return usual | asked.options()


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
        ids = await answers.tokenised(messages.encoded, state.spec, asked.messages)
    else:
        options = {"add_special_tokens": asked.add_special_tokens, "verbose": False}
        try:
            text = fitting(well_formed(asked.prompt or "", "the prompt"), tokenizer, length)
        except InputError as error:
            raise refused(error, "prompt") from error
        ids = await answers.tokenised(partial(tokenizer.encode, text, **options))
    return {"tokens": ids, "count": len(ids), "max_model_len": length}
