"""Admission: every request holds a place of its caller, from its headers to the end of its answer.

    headers    place: 429 if the caller has no more
    body       bytes are counted
    lane       callers in turns: parse, tokenise, read pictures        Lane(2): two callers at a time
    lane       a grammar's trial; the scores of an `echo`              Lane(1)
    engine     queue and decoding, callers in turns there, too

A caller is an API key, or an address without keys. A request whose client leaves, or whose time is over, loses its
place at once. A thread that works for it ends at its next pause, and holds the lane until then.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import TypeVar, cast, final

from treespec.files.pauses import pausing
from treespec.serve.errors import ApiError

T = TypeVar("T")
MAX_CALLER_BYTES = 128 << 20  # of bodies that a caller's requests hold
MAX_CALLER_PIXELS = 1 << 26
MAX_CALLER_LOGPROBS = 1 << 20  # of prompts and answers, at half a kilobyte each
DEMOTION_SECONDS = 60.0  # for which a caller with a refused grammar goes behind the others


class AbandonedError(Exception):
    """Nobody waits for this work any more: the client has left, or the request's time is over."""


@final
class Lane:
    """A row of callers who wait for work of one kind. At most `slots` work at a time, each caller once.

    Callers take turns, and so do the requests of one caller. Two slots; A asks three times, then B and C ask:

        works    a1       a1 b1    b1 c1    c1 a2
        waits    a2 a3    a2 a3    a2 a3    a3

    Attributes:
        requeues: whether work in pieces goes to the back of the lane at each pause.
    """

    def __init__(self, slots: int, requeues: bool = False) -> None:
        self.requeues = requeues
        self._free = slots
        self._working: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next caller is the first
        self._demoted: dict[str, float] = {}  # until when

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def enter(self, caller: str) -> None:
        """Wait for a turn. Each one ends with `leave`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(caller)
            raise

    def leave(self, caller: str) -> None:
        """End the turn of a caller, and let the next one in."""
        self._free += 1
        self._working.discard(caller)
        if caller in self._waiting:
            self._waiting[caller] = self._waiting.pop(caller)  # behind the others
        self._admit()

    def put_behind(self, caller: str) -> None:
        """Let the other callers go before this one for a while."""
        self._demoted[caller] = asyncio.get_running_loop().time() + DEMOTION_SECONDS

    def _admit(self) -> None:
        """Give free slots to those whose turn it is."""
        while self._free:
            caller = self._find_next()
            if caller is None:
                return
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.done():  # it has not left meanwhile
                self._free -= 1
                self._working.add(caller)
                turn.set_result(None)

    def _find_next(self) -> str | None:
        """The caller whose turn it is; None if none may work now."""
        now = asyncio.get_running_loop().time()
        self._demoted = {name: end for name, end in self._demoted.items() if end > now}
        callers = [caller for caller in self._waiting if caller not in self._working]
        callers.sort(key=self._demoted.__contains__)
        if not callers:
            return None
        return callers[0]


@final
class Admission:
    """The places of all callers.

    Attributes:
        limits: of what the requests of one caller may hold together: answers, bytes, pixels, log-probabilities.
        places: of the requests that are under way.
        texts, grammars, scores: the lanes.
    """

    def __init__(self, answers: int, seconds: float) -> None:
        """answers: the most that run and wait for one caller. seconds: the longest that a place is held."""
        self.limits = {"answers": answers, "bytes": MAX_CALLER_BYTES, "pixels": MAX_CALLER_PIXELS}
        self.limits["log-probabilities"] = MAX_CALLER_LOGPROBS
        self.seconds = seconds
        self.places: set[RequestPlace] = set()
        self.held: dict[str, Counter[str]] = {}  # by caller
        self.texts = Lane(2, requeues=True)
        self.grammars = Lane(1)
        self.scores = Lane(1)

    def enter(self, caller: str) -> "RequestPlace":
        """Take a place. Raises ApiError, a 429, if the caller's places are all taken."""
        place = RequestPlace(self, caller)
        place.hold("answers", 1)
        self.places.add(place)
        return place

    def end_now(self) -> None:
        """End the time of all requests."""
        for place in list(self.places):
            place.end_now()


@final
class RequestPlace:
    """What a request holds, from its headers to the end of its answer.

    Attributes:
        caller: whose it is.
        end: the time at which the request must be answered, by the event loop's clock.
        gone: set once the client has left, or has its whole answer.
        is_answered: whether the last part of the answer has been handed over.
        is_left: whether the client has left before.
    """

    def __init__(self, admission: Admission, caller: str) -> None:
        self.admission = admission
        self.caller = caller
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + admission.seconds
        self.gone = asyncio.Event()
        self.is_answered = False
        self.is_left = False
        self._held: Counter[str] = Counter()
        self._lane: Lane | None = None
        self._timeout: asyncio.Timeout | None = None
        self._is_working = False  # a thread works in the lane
        self._is_over = False

    def hold(self, kind: str, amount: int) -> None:
        """Count what the request holds, of a kind of `Admission.limits`.

        Raises: ApiError, a 429, beyond the caller's limit; a 400 if the request alone is beyond it.
        """
        limit = self.admission.limits[kind]
        if amount > limit:
            raise ApiError(
                400, f"the request asks for {amount} {kind}, at most {limit} are allowed"
            )
        held = self.admission.held.setdefault(self.caller, Counter())
        if held[kind] + amount > limit:
            if not held.total():
                del self.admission.held[self.caller]
            raise ApiError(
                429,
                f"your requests hold {held[kind]} {kind}, at most {limit} may run and wait: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": "5"},
            )
        held[kind] += amount
        self._held[kind] += amount

    async def move(self, lane: Lane) -> None:
        """Leave the lane, and wait for a turn in another one. Raises TimeoutError at the deadline."""
        self.leave()
        async with self._until_end():
            await lane.enter(self.caller)
        self._lane = lane

    def leave(self) -> None:
        """Leave the lane, as soon as no thread works there for this request."""
        if self._lane is not None and not self._is_working:
            self._lane.leave(self.caller)
            self._lane = None

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` on a thread, in the lane, and return its result. Raises its error; TimeoutError at the deadline.

        If the request ends before, `take_pause` ends the work by an AbandonedError. The thread keeps no process alive.
        """
        done: asyncio.Future[T] = self.loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._is_working = False
            if self._is_over:
                self.leave()
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast(T, result))

        def run_call() -> None:
            result = None
            fault: BaseException | None = None
            try:
                with pausing(self._take_pause):
                    result = call()
            except ApiError as error:
                fault = error.with_traceback(None)
                fault.__context__ = None  # it and the traceback hold all that the body held
            except BaseException as error:  # it is raised where the result is awaited
                fault = error
            with suppress(RuntimeError):  # the event loop has ended
                self.loop.call_soon_threadsafe(finish, result, fault)

        self._is_working = True
        Thread(target=run_call, name="treespec-request", daemon=True).start()
        try:
            async with self._until_end():
                return await done
        except BaseException:
            self._is_over = self._is_over or self._is_working
            raise

    def end_now(self) -> None:
        """End the request's time now."""
        self.end = self.loop.time()
        if self._timeout is not None:
            self._timeout.reschedule(self.end)

    def close(self) -> None:
        """Give up the place."""
        self._is_over = True
        self.leave()
        self.admission.places.discard(self)
        held = self.admission.held.get(self.caller)
        if held is not None:
            held.subtract(self._held)
            if not held.total():
                del self.admission.held[self.caller]
        self._held.clear()

    @asynccontextmanager
    async def _until_end(self) -> AsyncIterator[None]:
        """A block that raises TimeoutError at the request's end."""
        try:
            async with asyncio.timeout_at(self.end) as self._timeout:
                yield
        finally:
            self._timeout = None

    def _take_pause(self) -> None:
        """On a working thread: end the work if the request is over, or let others in the lane go first."""
        if self._is_over:
            raise AbandonedError
        lane = self._lane
        if lane is not None and lane.requeues and lane.has_waiting:
            asyncio.run_coroutine_threadsafe(self._enter_again(lane), self.loop).result()
            if self._is_over:
                raise AbandonedError

    async def _enter_again(self, lane: Lane) -> None:
        """Go to the back of the lane."""
        lane.leave(self.caller)
        await lane.enter(self.caller)
