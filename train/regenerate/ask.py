"""Who answers: the target here, or a server with OpenAI's interface, such as vLLM or SGLang.

An answer's draws come from a seed of its own, so it does not depend on the rows that run at the same
time, but for rounding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from threading import Event
from typing import Any

from treespec.api.engine import Engine
from treespec.errors import InputError
from treespec.files.openai_client import EndpointReply, describe_error, stream_chat_completion
from treespec.text.turns import split_thought
from treespec.train.regenerate.config import RegenerateConfig

Messages = list[dict[str, str]]

REQUEST_TRIES = 6
RETRY_PAUSE_SECONDS = 1.0  # seconds before a failed request is repeated, doubled each time
REFUSED_STATUSES = {400, 413, 422}  # statuses that mean this conversation
FOR_GOOD = {401, 403, 404}  # statuses that mean every request; the others go by
CHARACTERS_PER_TOKEN = 4  # of a token, about: the server alone has the tokenizer
WITH_IDS = "return_token_ids"  # vLLM's field of a request


@dataclass(frozen=True)
class RegeneratedAnswer:
    """ended: by `model`, or by the limit `max_new_tokens`. thought: as a server tells it apart.

    prompt_ids, token_ids: what was answered, and the answer with its thoughts and end; () where a server does not
    tell them.
    """

    text: str
    tokens: int
    ended: str
    thought: str = ""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message. Its thoughts stand where templates and other tools look for them."""
        message = {"role": "assistant", "content": self.text}
        if self.thought.strip():
            message["reasoning_content"] = self.thought
        return message


class LeftOut(Exception):
    """A question that cannot be answered; the message says why. Its conversation ends before it."""


Ask = Callable[
    [Messages, int, bool], RegeneratedAnswer
]  # (messages, seed, whether at temperature 0)


def check_lengths(config: RegenerateConfig, question: int, messages: int) -> None:
    """Raises LeftOut for a question or a conversation of too many tokens."""
    if question > config.question_tokens:
        raise LeftOut("a question is too long")
    if messages + config.max_new_tokens > config.max_length:
        raise LeftOut("a conversation is too long")


def ask_target(engine: Engine, config: RegenerateConfig) -> Ask:
    """Asks the target of an engine."""
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
        written = tokenizer.decode(output.token_ids, clean_up_tokenization_spaces=False)
        thought = ""
        text = output.text
        parts = split_thought(tokenizer, engine.spec.template, messages, written)
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
    """Asks a server. One that takes seeds draws each answer from one of its own."""
    url = str(config.endpoint).rstrip("/")
    more: dict[str, object] = {WITH_IDS: True}  # until the server turns out not to know it
    is_known = Event()

    def ask(messages: Messages, seed: int, greedy: bool) -> RegeneratedAnswer:
        lengths = [len(message["content"]) // CHARACTERS_PER_TOKEN for message in messages]
        check_lengths(config, lengths[-1], sum(lengths))
        said = [{name: message[name] for name in ("role", "content")} for message in messages]
        body = {"model": config.target, "messages": said, "seed": seed % 2**31}
        body |= config.to_sampling_options(greedy)
        body["max_tokens"] = body.pop("max_new_tokens")
        if not body["top_k"]:  # not OpenAI's, but vLLM's and SGLang's
            del body["top_k"]
        try:
            reply = post_request(url, body | more)
            is_known.set()
        except LeftOut:
            if is_known.is_set() or not more:
                raise
            reply = post_request(url, body)
            more.clear()
        return read_reply(reply)

    return ask


def read_reply(reply: EndpointReply) -> RegeneratedAnswer:
    """A server's reply as an answer.

    Raises LeftOut where the server counts thoughts that it does not tell: a head would learn answers without them.
    """
    # 1. Token ids count where they are all of the answer's.
    counted = reply.usage.get("completion_tokens")
    ids = reply.token_ids
    if not reply.prompt_ids or (counted and counted != len(ids)):
        ids = []

    # 2. Its thoughts.
    details = reply.usage.get("completion_tokens_details") or {}
    if details.get("reasoning_tokens") and not (ids or reply.thought):
        raise LeftOut("the server does not tell the thoughts of an answer")
    return RegeneratedAnswer(
        reply.text,
        counted or len(reply.text + reply.thought) // CHARACTERS_PER_TOKEN,
        "max_new_tokens" if reply.cut else "model",
        reply.thought,
        reply.prompt_ids if ids else (),
        ids,
    )


def post_request(url: str, body: dict[str, Any]) -> EndpointReply:
    """The server's reply. A request is repeated where the server is busy or the connection breaks.

    Raises LeftOut where the server refuses this conversation, InputError where it answers no more.
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
