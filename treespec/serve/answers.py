"""The engine's answers to one HTTP request: submitted, awaited and cancelled together."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

from fastapi import Request

from treespec.api.spec import Spec
from treespec.engine.output import Completion
from treespec.engine.request import Piece
from treespec.errors import InputError, TooLong, Unavailable, describe_os_error
from treespec.files.pauses import take_pause
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS
from treespec.serve.admission import Lane, RequestPlace
from treespec.serve.errors import ApiError, build_bad_request, to_api_error
from treespec.serve.state import State, get_state
from treespec.text.pictures import count_pixels, has_pictures

QUIET_SECONDS = 5.0  # seconds without a piece after which a stream sends a comment
Arrival = tuple[int, Piece | None]
T = TypeVar("T")


@final
class Answers:
    """The answers to one HTTP request, by the index of their choices.

    The request holds a place, whose deadline covers all from its arrival on.

    Iterate once. The iterator yields (index, piece) for each piece of any answer as it arrives, (index, None) when
    that answer ends, and None after `QUIET_SECONDS` without a piece. It raises ApiError if an answer fails, or at the
    deadline; then, and when the client leaves, all answers are cancelled. With two answers it may yield:

        (0, "The")  (1, "A")  None  (1, None)  (0, None)

    Attributes:
        place: the request's.
        keep: called with the text of each finished answer; None to keep none.
    """

    def __init__(self, request: Request) -> None:
        self.state: State = get_state(request)
        self.request = request
        self.place: RequestPlace = request.state.place
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.answers: list[Completion] = []
        self.cancelled = False
        # Called with the text of each finished answer.
        self.keep: Callable[[str], None] | None = None

    async def run(
        self, call: Callable[[], T], param: str | None = None, lane: Lane | None = None
    ) -> T:
        """Run `call` on a thread in the request's lane, and return its result.

        Args:
            call: the function to run.
            param: the field of the request that an error names. Default: None.
            lane: another lane to move to first. Default: None, the present one.

        Raises: ApiError if `call` raises InputError, and at the deadline.
        """
        try:
            if lane is not None:
                await self.place.move(lane)
            return await self.place.run(call)
        except TimeoutError:
            raise self.state.build_timeout_error() from None
        except Unavailable as error:
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from error
        except TooLong as error:
            raise self.state.build_length_error(str(error), param) from error
        except InputError as error:
            if self.state.engine.closed:
                raise self.state.cut() from error
            raise build_bad_request(error, param) from error

    async def admit_pictures(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Count the pixels of a request's pictures, before they are decoded. Raises ApiError beyond a limit."""
        if has_pictures(messages):
            pixels = await self.run(partial(count_pixels, messages), "messages")
            self.place.hold("pixels", pixels)

    def hold_logprobs(self, tokens: int, top: int) -> None:
        """Count log-probabilities. tokens: how many have some; top: further ones with each. Raises ApiError."""
        self.place.hold("log-probabilities", tokens * (1 + top))

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int | None,
        options: Mapping[str, Any],
        after_thought: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        choose_spec: Callable[[], Spec | None] = lambda: None,
    ) -> None:
        """Submit all answers to the engine, and leave the lane.

        Args:
            prompts: token ids of each prompt.
            samples: number of answers to each prompt.
            seed: seed of the first answer; each further answer takes the next seed. None: random seeds.
            options: further keywords of `Engine.submit_n`.
            after_thought: lets the grammar in the options begin after a thought. Default: None.
            choose_spec: builds the Spec that decodes, on a thread. Default: the engine's own.

        Raises: ApiError, after cancelling answers that were submitted already.
        """
        # 1. Refuse more answers than this server's queue holds.
        state = self.state
        self.prompts = prompts
        self.samples = samples
        answer_count = len(prompts) * samples
        limit = state.most_answers
        if answer_count > limit:
            message = (
                f"{answer_count} answers are asked for: this server's limit is {limit} a request"
            )
            param = "prompt"
            if samples > 1:
                param = "n"
            raise ApiError(400, message, param)
        self.place.hold("answers", answer_count - 1)
        if options.get("logprobs"):
            self.hold_logprobs(answer_count * options["max_new_tokens"], options["top_logprobs"])

        # 2. Try out the grammar, and enter the engine's queue.
        def submit() -> None:
            spec = choose_spec()
            for prompt in prompts:
                first_index = len(self.answers)
                first_seed = None
                if seed is not None:
                    first_seed = seed + first_index
                listeners = [
                    self._build_listener(index)
                    for index in range(first_index, first_index + samples)
                ]
                keywords: Any = {"seed": first_seed, "on_pieces": listeners, **options}
                keywords |= {"caller": self.place.caller, "spec": spec}
                take_pause()
                self.answers += state.engine.submit_n(prompt, samples, **keywords)
                if self.cancelled:  # meanwhile
                    self.cancel()

        try:
            for kind in options.keys() & GRAMMAR_KINDS:
                await self._try_grammar(kind, options[kind])
            if after_thought is not None:
                options = after_thought(options)
            await self.run(submit)
        except BaseException:
            self.cancel()
            raise
        self.place.leave()

    async def _try_grammar(self, kind: str, source: object) -> None:
        """Refuse a grammar that would hold up other requests. Raises ApiError."""
        grammars = self.state.admission.grammars
        try:
            await self.run(partial(self.state.trial.run, kind, source), lane=grammars)
        except BaseException:
            grammars.put_behind(self.place.caller)
            raise

    def _build_listener(self, index: int) -> Callable[[Piece | None], None]:
        """Build the callback of an answer; the engine's thread calls it with each piece."""
        measure = self.state.metrics.watch()

        def take_piece(piece: Piece | None) -> None:
            measure(piece)
            with suppress(RuntimeError):  # the server has shut down, and its event loop with it
                self.loop.call_soon_threadsafe(self.arrived.put_nowait, (index, piece))

        return take_piece

    def cancel(self) -> None:
        """Cancel all answers."""
        self.cancelled = True
        for answer in self.answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Arrival | None]:
        done: set[int] = set()
        try:
            while len(done) < len(self.answers):
                arrival = await self._wait()
                if arrival is not None:
                    index, piece = arrival
                    if piece is None:
                        self._end_answer(index)
                        done.add(index)
                yield arrival
        finally:
            self.cancel()
            for index, answer in enumerate(self.answers):
                self.state.metrics.count(answer, done=index in done)

    async def _wait(self) -> Arrival | None:
        """The next arrival; None after `QUIET_SECONDS` without one. Raises ApiError at the deadline."""
        seconds = self.place.end - self.loop.time()
        try:
            # Not `wait_for`, which in Python 3.11 forgets a cancellation if a piece arrives at the same moment.
            async with asyncio.timeout(min(seconds, QUIET_SECONDS)):
                return await self.arrived.get()
        except TimeoutError:
            if seconds <= QUIET_SECONDS:
                raise self.state.build_timeout_error() from None
            return None

    def _end_answer(self, index: int) -> None:
        """Pass a finished answer to `keep`. Raises ApiError if the answer failed."""
        answer = self.answers[index]
        if answer.error:
            if self.state.cut_off:
                raise self.state.cut()
            raise to_api_error(answer.error)
        if self.keep:
            self.keep(answer.output.text)


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner reads, for `open`."""
    return os.open(path, flags, mode=0o600)


def keep(file: Path, messages: Sequence[Mapping[str, Any]], answer: str) -> None:
    """Append a chat and its answer to `file` as a line of JSON. A write error is printed on standard error.

    Only its owner reads the file. If a killed process left a partial last line, a line break is written first, so that
    the new line is complete.
    """
    chat = {"messages": [*messages, {"role": "assistant", "content": answer}]}
    line = json.dumps(chat, ensure_ascii=False).encode() + b"\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(file, "ab+", opener=open_private) as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(size - 1, 0))
            if lines.read(1) not in (b"", b"\n"):
                line = b"\n" + line
            lines.write(line)
    except OSError as error:
        print(f"cannot write {file}: {describe_os_error(error)}", file=sys.stderr)
