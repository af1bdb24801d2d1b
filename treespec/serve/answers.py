"""Answers of the engine for one HTTP request: submitted together, awaited, cancelled together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final

from anyio import fail_after, to_thread
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from treespec.decoding.sequence import Piece
from treespec.errors import Busy, InputError
from treespec.requests.output import Completion
from treespec.serve.errors import ApiError, failed, refused
from treespec.serve.state import State
from treespec.shaping.compiled import KINDS

QUIET = 15.0  # seconds after which a stream says that it still waits
Arrival = tuple[int, Piece | None]
T = TypeVar("T")


@final
class Answers:
    """The answers of one request, in the order in which its choices are numbered.

    The request's deadline counts from here: over tokenising, queue, prefill and decoding.
    Iterate once: (number, piece) of any answer as it comes, (number, None) at its end, and None
    where nothing came for a while. It raises ApiError where an answer fails or the time is over;
    all answers are cancelled then.
    """

    def __init__(self, state: State) -> None:
        self.state, self.loop = state, asyncio.get_running_loop()
        self.end = self.loop.time() + state.limits.seconds
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.answers: list[Completion] = []
        self.gone: asyncio.Task | None = None
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        """Seconds until the request's deadline."""
        return max(0.0, self.end - self.loop.time())

    def late(self) -> ApiError:
        seconds = self.state.limits.seconds
        return ApiError(504, f"the answer took longer than this server's limit of {seconds:g} s")

    async def tokenised(self, encode: Callable[..., T], *given: Any) -> T:
        """encode(*given), on one of few threads. Raises ApiError after the deadline."""
        call, limiter = partial(encode, *given), self.state.tokenising
        try:
            with fail_after(self.left):
                return await to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=True)
        except TimeoutError:
            raise self.late() from None

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
        self.deadline = self.loop.call_later(self.left, self.cancel)
        try:
            async with asyncio.timeout_at(self.end):
                await self._try_grammar(options)
                for place, prompt in enumerate(prompts):
                    number = place * samples
                    own = None if seed is None else seed + number
                    await run_in_threadpool(self._submit, number, prompt, samples, own, options)
        except BaseException as error:
            self.cancel()
            if isinstance(error, TimeoutError):
                raise self.late() from error
            if isinstance(error, Busy):
                raise self.state.busy(str(error)) from error
            if isinstance(error, InputError):
                raise refused(error) from error
            raise

    async def _try_grammar(self, options: Mapping[str, Any]) -> None:
        """Raises InputError for a grammar that would hold up the others."""
        for kind in KINDS:
            if kind in options:
                limiter = self.state.compiling
                await to_thread.run_sync(self.state.trial.run, kind, options[kind], limiter=limiter)

    def _submit(
        self,
        first: int,
        prompt: Sequence[int],
        samples: int,
        seed: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """Several samples of a prompt. first: the number of the first of them."""
        on_pieces = [self._listener(first + sample) for sample in range(samples)]
        engine: Any = self.state.engine
        self.answers += engine.submit_n(prompt, samples, seed=seed, on_pieces=on_pieces, **options)

    def _listener(self, number: int) -> Callable[[Piece | None], None]:
        seen = self.state.metrics.watch()

        def on_piece(piece: Piece | None) -> None:  # on the engine's thread
            seen(piece)
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                self.loop.call_soon_threadsafe(self.arrived.put_nowait, (number, piece))

        return on_piece

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
                        raise ApiError(499, "the client left") if self.left else self.late()
                    done.add(arrival[0])
                yield arrival
        finally:
            self.cancel()
            if self.deadline:
                self.deadline.cancel()
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
        try:
            return await asyncio.wait_for(self.arrived.get(), min(self.left, QUIET))
        except TimeoutError:
            if self.left:
                return None
            raise self.late() from None


async def _left(request: Request, then: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    then()
