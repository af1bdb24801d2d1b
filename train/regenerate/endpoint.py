"""Questions answered by a server with OpenAI's interface, such as vLLM or SGLang, several at a time."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, final

from treespec.errors import InputError
from treespec.requests.endpoint import Reply, completed, said_by
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.questions import Answer, Answered, drawn

TRIES = 6
PAUSE = 1.0  # seconds before a failed request is repeated, doubled each time
BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses that go by
REFUSED = {400, 413, 422}  # statuses that mean this conversation
CHARACTERS = 4  # of a token, about: the server alone has the tokenizer


@final
class Endpoint:
    """Answers by a server. One that takes seeds draws each answer from one of its own."""

    def __init__(self, config: RegenerateConfig) -> None:
        self.config = config
        assert config.endpoint is not None
        self.url = config.endpoint.rstrip("/")

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
        try:
            reply = self._reply(body, stopped)
        except ValueError as error:
            raise InputError(f"{self.url} answers with no chat completion: {error}") from error
        if isinstance(reply, str):
            return f"refused: {reply}"
        tokens = reply.usage.get("completion_tokens") or len(reply.text) // CHARACTERS
        return Answer(reply.text, tokens, "max_new_tokens" if reply.cut else "model")

    def _reply(self, body: dict[str, Any], stopped: Event) -> Reply | str:
        """The server's reply, or why it refuses this conversation.

        A request is repeated where the server is busy or the connection breaks.
        """
        why = ""
        for attempt in range(TRIES):
            if attempt and stopped.wait(PAUSE * 2 ** (attempt - 1)):
                break
            try:
                return completed(self.url, body)
            except (OSError, HTTPException) as error:
                why, code = said_by(error), getattr(error, "code", None)
                if code in REFUSED:
                    return why
                if code is not None and code not in BUSY:
                    raise InputError(f"{self.url}: {why}") from error
        raise InputError(
            f"{self.url}: {why}; the answers so far are kept, repeat the command to go on"
        )
