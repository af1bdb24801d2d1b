"""Answers of the engine for one HTTP request: submitted together, awaited, cancelled together."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from treespec.answer import Answer
from treespec.errors import Busy, InputError
from treespec.serve.errors import ApiError, failed, refused
from treespec.serve.state import State
from treespec.texts import Piece

QUIET = 15.0  # seconds after which a stream says that it still waits
Arrival = tuple[int, Piece | None]


@final
class Answers:
    """The answers of one request, in the order in which its choices are numbered.

    Iterate once: (number, piece) of any answer as it comes, (number, None) at its end, and None
    where nothing came for a while. It raises ApiError where an answer fails or the time is over;
    all answers are cancelled then.
    """

    def __init__(self, state: State) -> None:
        self.state, self.started = state, time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.answers: list[Answer] = []
        self.gone: asyncio.Task | None = None

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
        self.state.check_answers(len(prompts), samples)
        try:
            for place, prompt in enumerate(prompts):
                before = place * samples
                own = None if seed is None else seed + before
                await run_in_threadpool(self._submit, before, prompt, samples, own, options)
        except BaseException as error:
            self.cancel()
            if isinstance(error, Busy):
                raise self.state.busy(str(error)) from error
            if isinstance(error, InputError):
                raise refused(error) from error
            raise

    def _submit(
        self,
        before: int,
        prompt: Sequence[int],
        samples: int,
        seed: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """Samples of one prompt. before: answers to the prompts before it."""
        watches = [self.state.metrics.watch() for _ in range(samples)]

        def on_piece(sample: int, piece: Piece | None) -> None:  # on the engine's thread
            watches[sample](piece)
            arrival = (before + sample, piece)
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                self.loop.call_soon_threadsafe(self.arrived.put_nowait, arrival)

        submit: Any = self.state.engine.submit_samples
        self.answers += submit(prompt, samples, seed=seed, on_piece=on_piece, **options)

    def watch(self, request: Request) -> None:
        """Cancel the answers when the client leaves."""
        self.gone = asyncio.create_task(_left(request, self.cancel))

    def cancel(self) -> None:
        for answer in self.answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Arrival | None]:
        done: set[int] = set()
        try:
            while len(done) < len(self.answers):
                arrival = await self._next()
                if arrival and arrival[1] is None:
                    answer = self.answers[arrival[0]]
                    if answer.error:
                        raise self.state.cut() if self.state.cut_off else failed(answer.error)
                    if answer.cancelled:
                        raise ApiError(499, "the client left")
                    done.add(arrival[0])
                yield arrival
        finally:
            self.cancel()
            if self.gone:
                self.gone.cancel()
            for number, answer in enumerate(self.answers):
                self.state.metrics.count(answer, done=number in done)

    async def arrivals(self) -> AsyncIterator[Arrival]:
        """The same without the None of a long wait."""
        async for arrival in self:
            if arrival:
                yield arrival

    async def _next(self) -> Arrival | None:
        seconds = self.state.limits.seconds
        left = self.started + seconds - time.monotonic()
        try:
            return await asyncio.wait_for(self.arrived.get(), max(0.0, min(left, QUIET)))
        except TimeoutError:
            if left > QUIET:
                return None
            raise ApiError(
                504, f"the answer took longer than this server's limit of {seconds:g} s"
            ) from None


async def _left(request: Request, then: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    then()
