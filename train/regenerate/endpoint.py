"""Questions answered by a server with OpenAI's interface, such as vLLM or SGLang, several at a time."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, final

from treespec.errors import InputError
from treespec.text.strings import one_line
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.questions import Answer, Answered, drawn

KEY = "OPENAI_API_KEY"  # the environment variable of the server's key
TRIES = 6
BROKEN = (OSError, http.client.HTTPException, ValueError)  # no connection, or half an answer
PAUSE = 1.0  # seconds before a failed request is repeated, doubled each time
SECONDS = 600.0  # for one answer
BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses that go by
REFUSED = {400, 413, 422}  # statuses that mean this conversation
CHARACTERS = 4  # of a token, about: the server alone has the tokenizer


@final
class Endpoint:
    """Answers by a server. One that takes seeds draws each answer from one of its own."""

    def __init__(self, config: RegenerateConfig) -> None:
        self.config = config
        assert config.endpoint is not None
        self.url = config.endpoint.rstrip("/") + "/chat/completions"

    def answers(self, rows: Sequence[Answered]) -> Iterator[tuple[Answered, Answer | str]]:
        """Each row with the answer to its next question, or why there is none.

        Raises InputError where the server does not answer any more.
        """
        # 1. As many threads as requests at a time; they end with the process.
        waiting: SimpleQueue[Answered] = SimpleQueue()
        said: SimpleQueue[tuple[Answered, Answer | str | BaseException]] = SimpleQueue()
        stopped = Event()
        for row in rows:
            waiting.put(row)

        def work() -> None:
            with suppress(Empty):
                while not stopped.is_set():
                    one = waiting.get_nowait()
                    try:
                        said.put((one, self._answer(one, stopped)))
                    except BaseException as error:
                        said.put((one, error))

        for _ in range(min(self.config.batch, len(rows))):
            Thread(target=work, daemon=True).start()

        # 2. What they report.
        try:
            for _ in rows:
                one, answer = said.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield one, answer
        finally:
            stopped.set()

    def _answer(self, one: Answered, stopped: Event) -> Answer | str:
        # 1. The question, if the server will take it.
        messages = one.next_question
        if len(messages[-1]["content"]) > CHARACTERS * self.config.question_tokens:
            return "a question is too long"
        length = sum(len(message["content"]) for message in messages)
        if length > CHARACTERS * (self.config.max_length - self.config.max_new_tokens):
            return "a conversation is too long"
        options = self.config.sampling(one.greedy)
        body: dict[str, Any] = {
            "model": self.config.target,
            "messages": messages,
            "temperature": options["temperature"],
            "top_p": options["top_p"],
            "max_tokens": options["max_new_tokens"],
            "seed": drawn(self.config.seed, one.row.key, len(one.answers)) % 2**31,
        }
        if options["top_k"]:  # not OpenAI's, but vLLM's and SGLang's
            body["top_k"] = options["top_k"]

        # 2. Its reply.
        reply = self._reply(json.dumps(body).encode(), stopped)
        if isinstance(reply, str):
            return f"refused: {reply}"
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] or ""
            usage = reply.get("usage") or {}
            tokens = usage.get("completion_tokens") or len(text) // CHARACTERS
            ended = "max_new_tokens" if choice.get("finish_reason") == "length" else "model"
            return Answer(str(text), int(tokens), ended)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.url} answers with no chat completion: {one_line(str(reply))[:200]}"
            ) from error

    def _reply(self, body: bytes, stopped: Event) -> Any:
        """The server's reply, or why it refuses this conversation.

        A request is repeated where the server is busy or the connection breaks.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
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
                    return why
                if error.code not in BUSY:
                    hint = f"; its key is taken from {KEY}" if error.code in (401, 403) else ""
                    raise InputError(f"{self.url} refuses requests: {why}{hint}") from error
            except BROKEN as error:
                why = one_line(str(getattr(error, "reason", None) or error))
        raise InputError(
            f"{self.url} does not answer ({why}): the answers so far are kept, repeat the command to go on"
        )
