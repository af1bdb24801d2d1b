"""Get answers from the target in this process, or from a server with OpenAI's interface (vLLM, SGLang).

Each answer is sampled with its own seed. So requests that run at the same time change it only by rounding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from threading import Event
from typing import Any

from treespec.api.engine import Engine
from treespec.errors import InputError
from treespec.files.openai_client import (
    REQUEST_TRIES,
    RETRY_PAUSE_SECONDS,
    EndpointReply,
    describe_error,
    stream_chat_completion,
)
from treespec.text.turns import split_thought
from treespec.train.regenerate.config import RegenerateConfig

Messages = list[dict[str, str]]

REFUSED_STATUSES = {400, 413, 422}  # HTTP statuses that refuse this conversation only
FOR_GOOD = {401, 403, 404}  # HTTP statuses that refuse every request; after others we retry
CHARACTERS_PER_TOKEN = 4  # estimate, because only the server has the tokenizer
WITH_IDS = "return_token_ids"  # vLLM's field that asks for token ids


@dataclass(frozen=True)
class RegeneratedAnswer:
    """An answer.

    Attributes:
        text: the answer, without its thoughts.
        tokens: the number of its tokens, with its thoughts.
        ended: what ended it: "model", or the limit "max_new_tokens".
        thought: the thoughts before the answer.
        prompt_ids: the token ids of the prompt; () if a server does not return them.
        token_ids: the token ids of the answer with its thoughts and end; () if a server does not return them.
    """

    text: str
    tokens: int
    ended: str
    thought: str = ""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message, with its thoughts in `reasoning_content`, where templates look for them."""
        message = {"role": "assistant", "content": self.text}
        if self.thought.strip():
            message["reasoning_content"] = self.thought
        return message


class LeftOut(Exception):
    """Raised for a question that is left out; the message says why. Its conversation ends before the question."""


Ask = Callable[
    [Messages, int, bool], RegeneratedAnswer
]  # (messages, seed, whether at temperature 0)


def check_lengths(config: RegenerateConfig, question: int, messages: int) -> None:
    """Raises LeftOut for too long a question or conversation. question, messages: their numbers of tokens."""
    if question > config.question_tokens:
        raise LeftOut("a question is too long")
    if messages + config.max_new_tokens > config.max_length:
        raise LeftOut("a conversation is too long")


def ask_target(engine: Engine, config: RegenerateConfig) -> Ask:
    """Make the function that asks the target of an engine."""
    tokenizer = engine.spec.target.tokenizer

    def ask(messages: Messages, seed: int, greedy: bool) -> RegeneratedAnswer:
        question = tokenizer(messages[-1]["content"], add_special_tokens=False, verbose=False)
        try:
            prompt = engine.spec.encode(messages)
            check_lengths(config, len(question["input_ids"]), len(prompt))
            completion = engine.submit(prompt, seed=seed, **config.to_sampling_options(greedy))
        except InputError as error:
            raise LeftOut(f"cannot be asked: {error}") from error
        output = completion.result()
        decoded_answer = tokenizer.decode(output.token_ids, clean_up_tokenization_spaces=False)
        thought = ""
        text = output.text
        parts = split_thought(tokenizer, engine.spec.template, messages, decoded_answer)
        if parts is not None:
            thought, text = parts
        ended = "model"
        if output.stats.truncated:
            ended = "max_new_tokens"
        return RegeneratedAnswer(
            text=text,
            tokens=output.stats.new_tokens,
            ended=ended,
            thought=thought,
            prompt_ids=prompt,
            token_ids=output.token_ids,
        )

    return ask


def ask_endpoint(config: RegenerateConfig) -> Ask:
    """Make the function that asks a server. Each request has its own seed, for servers that read it."""
    url = str(config.endpoint).rstrip("/")
    id_fields: dict[str, object] = {WITH_IDS: True}  # emptied if the server refuses it
    has_replied = Event()

    def ask(messages: Messages, seed: int, greedy: bool) -> RegeneratedAnswer:
        lengths = [len(message["content"]) // CHARACTERS_PER_TOKEN for message in messages]
        check_lengths(config, lengths[-1], sum(lengths))
        plain_messages = [
            {name: message[name] for name in ("role", "content")} for message in messages
        ]
        body = {"model": config.target, "messages": plain_messages, "seed": seed % 2**31}
        body |= config.to_sampling_options(greedy)
        body["max_tokens"] = body.pop("max_new_tokens")
        if not body["top_k"]:  # not OpenAI's, but vLLM's and SGLang's
            del body["top_k"]
        try:
            reply = post_request(url, body | id_fields)
            has_replied.set()
        except LeftOut:
            if has_replied.is_set() or not id_fields:
                raise
            reply = post_request(url, body)
            id_fields.clear()
        return read_reply(reply)

    return ask


def read_reply(reply: EndpointReply) -> RegeneratedAnswer:
    """Turn a server's reply into an answer.

    Raises LeftOut if the server counts thoughts but does not return them: the head would learn answers without them.
    """
    # 1. Use the token ids if they are complete.
    completion_tokens = reply.usage.get("completion_tokens")
    ids = reply.token_ids
    if not reply.prompt_ids or (completion_tokens and completion_tokens != len(ids)):
        ids = []

    # 2. Check that the thoughts are there.
    details = reply.usage.get("completion_tokens_details") or {}
    if details.get("reasoning_tokens") and not (ids or reply.thought):
        raise LeftOut("the server does not tell the thoughts of an answer")
    tokens = completion_tokens
    if not tokens:
        tokens = len(reply.text + reply.thought) // CHARACTERS_PER_TOKEN
    return RegeneratedAnswer(
        reply.text,
        tokens,
        "max_new_tokens" if reply.cut else "model",
        reply.thought,
        reply.prompt_ids if ids else (),
        ids,
    )


def post_request(url: str, body: dict[str, Any]) -> EndpointReply:
    """Send a request, and return the reply. It is repeated if the server is busy or the connection breaks.

    Raises LeftOut if the server refuses this conversation, InputError if it refuses all or stops answering.
    """
    why = ""
    for attempt in range(REQUEST_TRIES):
        time.sleep(RETRY_PAUSE_SECONDS * 2 ** (attempt - 1) if attempt else 0)
        try:
            return stream_chat_completion(url, body)
        except (OSError, HTTPException) as error:
            why = describe_error(error)
            code = getattr(error, "code", None)
            if code in REFUSED_STATUSES:
                raise LeftOut(f"refused: {why}") from error
            if code in FOR_GOOD:
                raise InputError(f"{url}: {why}") from error
        except ValueError as error:
            raise InputError(f"{url} answers with no chat completion: {error}") from error
    raise InputError(
        f"{url}: {why}; the conversations so far are kept, repeat the command to go on"
    )
