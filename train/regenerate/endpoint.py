"""Rows answered by a server with OpenAI's interface, such as vLLM or SGLang, several at a time."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, final

from treespec.errors import InputError
from treespec.text.printable import one_line
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.rows import Answer, Answered, drawn

KEY = "OPENAI_API_KEY"  # the environment variable of the server's key
TRIES = 6
BROKEN = (OSError, http.client.HTTPException, ValueError)  # no connection, or half an answer
PAUSE = 1.0  # seconds before a failed request is repeated, doubled each time
SECONDS = 600.0  # for one answer
BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses that go by
REFUSED = {400, 413, 422}  # statuses that mean this conversation
CHARACTERS = 4  # of a token, about: the server alone has the tokenizer


class Refused(Exception):
    """The server takes this conversation not at all."""


@final
class Endpoint:
    """Answers by a server, conversations side by side, the turns of each one after another.

    A server that takes seeds draws each answer from one of its own.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        self.config, self.tokens, self.answers = config, 0, 0
        assert config.endpoint is not None
        self.url = config.endpoint.rstrip("/") + "/chat/completions"

    def answered(self, rows: Sequence[Answered]) -> Iterator[Answered]:
        """The rows, each time that one has another answer or is refused.

        Raises InputError where the server does not answer any more.
        """
        # 1. as many threads as requests at a time; they end with the process
        waiting: SimpleQueue[Answered] = SimpleQueue()
        events: SimpleQueue[Answered | BaseException] = SimpleQueue()
        stopped = Event()
        for row in rows:
            waiting.put(row)

        def work() -> None:
            try:
                while not stopped.is_set():
                    one = waiting.get_nowait()
                    while one.next_question is not None:
                        one = self._asked(one, stopped)
                        events.put(one)
            except Empty:
                return
            except BaseException as error:
                events.put(error)

        for _ in range(min(self.config.batch, len(rows))):
            Thread(target=work, daemon=True).start()

        # 2. what they report
        finished = 0
        try:
            while finished < len(rows):
                event = events.get()
                if isinstance(event, BaseException):
                    raise event
                if not event.problem:
                    self.tokens += event.answers[-1].tokens
                    self.answers += 1
                finished += event.next_question is None
                yield event
        finally:
            stopped.set()

    def _asked(self, one: Answered, stopped: Event) -> Answered:
        """A row with one more answer, or with what speaks against it."""
        messages = one.next_question
        assert messages is not None
        if len(messages[-1]["content"]) > CHARACTERS * self.config.question_tokens:
            return one.ending("a question is too long")
        length = sum(len(message["content"]) for message in messages)
        if length > CHARACTERS * (self.config.max_length - self.config.max_new_tokens):
            return one.ending("a conversation is too long")
        seed = drawn(self.config.seed, one.row.key, len(one.answers))
        try:
            return one.taking(self._answer(self._body(messages, one.greedy, seed), stopped))
        except Refused as error:
            return one.ending(f"refused: {error}")

    def _body(self, messages: Sequence[dict[str, str]], greedy: bool, seed: int) -> bytes:
        """A request for the next answer."""
        options = self.config.sampling(greedy)
        body: dict[str, Any] = {
            "model": self.config.target,
            "messages": list(messages),
            "temperature": options["temperature"],
            "top_p": options["top_p"],
            "max_tokens": options["max_new_tokens"],
            "seed": seed % 2**31,
        }
        if options["top_k"]:  # not OpenAI's, but vLLM's and SGLang's
            body["top_k"] = options["top_k"]
        return json.dumps(body).encode()

    def _answer(self, body: bytes, stopped: Event) -> Answer:
        reply = self._reply(body, stopped)
        try:
            choice = reply["choices"][0]
            answer = choice["message"]["content"] or ""
            tokens = (reply.get("usage") or {}).get("completion_tokens") or len(
                answer
            ) // CHARACTERS
            ended = "max_new_tokens" if choice.get("finish_reason") == "length" else "model"
            return Answer(str(answer), int(tokens), ended)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.url} answers with no chat completion: {one_line(str(reply))[:200]}"
            ) from error

    def _reply(self, body: bytes, stopped: Event) -> Any:
        """The server's reply. A request that fails for a while is repeated."""
        # 1. The request.
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"

        # 2. Ask, and ask again where the server is busy or the connection breaks.
        why = ""
        for attempt in range(TRIES):
            if attempt and stopped.wait(PAUSE * 2 ** (attempt - 1)):
                break
            try:
                request = urllib.request.Request(self.url, body, headers)
                with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                said = one_line(error.read(2000).decode(errors="replace"))[:200]
                why = f"HTTP {error.code} {said}"
                if error.code in REFUSED:
                    raise Refused(why) from error
                if error.code not in BUSY:
                    hint = f"; its key is taken from {KEY}" if error.code in (401, 403) else ""
                    raise InputError(f"{self.url} refuses requests: {why}{hint}") from error
            except BROKEN as error:
                why = one_line(str(getattr(error, "reason", None) or error))
        raise InputError(
            f"{self.url} does not answer ({why}): the answers so far are kept, repeat the command to go on"
        )
