"""Answers of the engine for one HTTP request: submitted together, awaited, cancelled together."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, final

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from treespec.engine.output import Completion
from treespec.engine.request import Piece
from treespec.errors import Busy, InputError
from treespec.sampling.compiled_grammar import KINDS
from treespec.serve.errors import ApiError, failed, refused
from treespec.serve.state import State

QUIET = 5.0  # seconds after which a stream says that it still waits
Arrival = tuple[int, Piece | None]
T = TypeVar("T")


@final
class Answers:
    """The answers of one request, in the order in which its choices are numbered.

    The request's deadline counts from here: over tokenising, queue, prefill and decoding.
    Iterate once: (number, piece) of any answer as it comes, (number, None) at its end, and None
    where nothing came for a while. It raises ApiError where an answer fails, the client leaves or the
    time is over; all answers are cancelled then.
    """

    def __init__(self, state: State, request: Request) -> None:
        self.state, self.request, self.loop = state, request, asyncio.get_running_loop()
        self.end = self.loop.time() + state.config.timeout
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.answers: list[Completion] = []
        self.keep: Callable[[str], None] | None = None  # each whole answer's text

    async def run(
        self,
        call: Callable[..., T],
        *given: Any,
        limiter: CapacityLimiter | None = None,
        param: str | None = None,
    ) -> T:
        """call(*given), on a thread. Raises ApiError for what it refuses, and after the deadline.

        limiter: bounds the threads. param: the field of the request that is refused.
        """
        try:
            async with asyncio.timeout_at(self.end):
                return await to_thread.run_sync(call, *given, limiter=limiter)
        except TimeoutError:
            raise self.state.late() from None
        except Busy as error:
            raise self.state.busy(str(error)) from error
        except InputError as error:
            raise refused(error, param) from error

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """Ask for several samples of each prompt. Raises ApiError; nothing is left running then.

        seed: of the first answer; each further answer takes the next seed.
        """
        state = self.state
        engine = self.state.engine
        self.prompts = prompts
        self.samples = samples
        asked = len(prompts) * samples
        if asked > (most := engine.batch + engine.queue):
            message = f"{asked} answers are asked for: this server's limit is {most} a request"
            raise ApiError(400, message, "n" if samples > 1 else "prompt")

        def submit() -> None:
            for prompt in prompts:
                numbers = range(len(self.answers), len(self.answers) + samples)
                own = None if seed is None else seed + numbers[0]
                listeners = [self._listener(number) for number in numbers]
                more: Any = {"seed": own, "on_pieces": listeners, **options}
                self.answers += engine.submit_n(prompt, samples, **more)

        try:
            for kind in options.keys() & KINDS:  # a grammar that would hold up others is refused
                await self.run(state.trial.run, kind, options[kind], limiter=state.compiling)
            await self.run(submit)
        except BaseException:
            self.cancel()
            raise

    def _listener(self, number: int) -> Callable[[Piece | None], None]:
        seen = self.state.metrics.watch()

        def on_piece(piece: Piece | None) -> None:  # on the engine's thread
            seen(piece)
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                self.loop.call_soon_threadsafe(self.arrived.put_nowait, (number, piece))

        return on_piece

    def cancel(self) -> None:
        for answer in self.answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Arrival | None]:
        done: set[int] = set()
        try:
            while len(done) < len(self.answers):
                arrival = None
                left = self.end - self.loop.time()
                with suppress(TimeoutError):
                    arrival = await asyncio.wait_for(self.arrived.get(), min(left, QUIET))
                if arrival is None and left <= QUIET:
                    raise self.state.late()
                if await self.request.is_disconnected():
                    raise ApiError(499, "the client left")
                if arrival and arrival[1] is None:
                    error = self.answers[arrival[0]].error
                    if error:
                        raise self.state.cut() if self.state.cut_off else failed(error)
                    done.add(arrival[0])
                    if self.keep:
                        self.keep(self.answers[arrival[0]].output.text)
                yield arrival
        finally:
            self.cancel()
            for number, answer in enumerate(self.answers):
                self.state.metrics.count(answer, done=number in done)


def keep(file: Path, messages: Sequence[Mapping[str, Any]], answer: str) -> None:
    """Append a chat and its answer as a line of JSON; a disk that refuses it is told of on standard error.

    A line that a kill has torn is ended first: the next one is whole.
    """
    line = {"messages": [*messages, {"role": "assistant", "content": answer}]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab+") as lines:
            lines.seek(max(lines.seek(0, os.SEEK_END) - 1, 0))
            begun = b"" if lines.read(1) in (b"", b"\n") else b"\n"
            lines.write(begun + json.dumps(line, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        print(f"cannot write {file}: {error.strerror or error}", file=sys.stderr)
