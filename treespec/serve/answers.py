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
    all answers are cancelled then, as they are where the client leaves.
    """

    def __init__(self, state: State, request: Request) -> None:
        self.state, self.request, self.loop = state, request, asyncio.get_running_loop()
        self.end = self.loop.time() + state.config.timeout
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.answers: list[Completion] = []

    @property
    def left(self) -> float:
        """Seconds until the request's deadline."""
        return max(0.0, self.end - self.loop.time())

    async def tokenised(self, encode: Callable[..., T], *given: Any) -> T:
        """encode(*given), on one of few threads. Raises ApiError after the deadline."""
        call, limiter = partial(encode, *given), self.state.tokenising
        try:
            with fail_after(self.left):
                return await to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=True)
        except TimeoutError:
            raise self.state.late() from None

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
        state, self.prompts, self.samples = self.state, prompts, samples
        engine: Any = state.engine
        if len(prompts) * samples > (most := engine.batch + engine.queue):
            asked = f"n is {samples}" + (f" for {len(prompts)} prompts" if len(prompts) > 1 else "")
            message = f"{asked}: this server's limit is {most} answers a request"
            raise ApiError(400, message, "n" if samples > 1 else "prompt")

        def submit(first: int, prompt: Sequence[int]) -> None:
            own = None if seed is None else seed + first
            heard = [self._listener(number) for number in range(first, first + samples)]
            self.answers += engine.submit_n(prompt, samples, seed=own, on_pieces=heard, **options)

        try:
            async with asyncio.timeout_at(self.end):
                for kind in (
                    options.keys() & KINDS
                ):  # a grammar that would hold up the others is refused
                    trial = partial(state.trial.run, kind, options[kind])
                    await to_thread.run_sync(trial, limiter=state.compiling)
                for place, prompt in enumerate(prompts):
                    await run_in_threadpool(submit, place * samples, prompt)
        except BaseException as error:
            self.cancel()
            if isinstance(error, TimeoutError):
                raise state.late() from error
            if isinstance(error, Busy):
                raise state.busy(str(error)) from error
            if isinstance(error, InputError):
                raise refused(error) from error
            raise
        self.deadline = self.loop.call_at(self.end, self.cancel)

        async def watch() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        self.gone = asyncio.create_task(watch())  # the client may leave

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
                arrival: Arrival | None = None
                with suppress(TimeoutError):
                    wait = min(self.left, QUIET)
                    arrival = await asyncio.wait_for(self.arrived.get(), wait)
                if arrival is None and not self.left:
                    raise self.state.late()
                if arrival and arrival[1] is None:
                    answer = self.answers[arrival[0]]
                    if answer.error:
                        raise self.state.cut() if self.state.cut_off else failed(answer.error)
                    if answer.cancelled:
                        raise ApiError(499, "the client left") if self.left else self.state.late()
                    done.add(arrival[0])
                yield arrival
        finally:
            self.cancel()
            self.deadline.cancel()
            self.gone.cancel()
            for number, answer in enumerate(self.answers):
                self.state.metrics.count(answer, done=number in done)
