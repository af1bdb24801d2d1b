"""Continuous batching: one thread decodes the requests of many callers together."""

import atexit
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Condition, Thread, current_thread
from typing import Unpack, final

import torch

from treespec.api.async_stream import AsyncStream
from treespec.api.spec import Spec
from treespec.engine.batch import order_by_turns, pop_admissible
from treespec.engine.decoder import Decoder
from treespec.engine.memory import free_columns
from treespec.engine.options import RequestKeywords, Seed
from treespec.engine.output import Completion, OnPiece, Output
from treespec.engine.prefill import IDLE_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS
from treespec.engine.request import Piece, Request
from treespec.errors import Busy, InputError
from treespec.files.locks import alone_with
from treespec.kernels.workers import end_workers
from treespec.options import require_whole_number
from treespec.text.prompts import Prompt

MIN_PREFILL_TOKENS = 16  # the least prompt tokens that are prefilled between two cycles


@final
class Engine:
    """Decodes the requests of many callers together, on a thread of its own.

    Requests enter the running batch between cycles: their callers in turns, those of one caller in the
    order in which they came. Between two cycles a chunk of one prompt is prefilled, and the prompts take
    turns. So a long prompt delays the other requests by no more than about two cycles at a time.

    Each request has its own options, seed and end. A request that fails or is cancelled leaves after
    the cycle that runs; the others go on. An error of the models ends all requests that run; later
    requests start with an empty cache.
    The engine decodes with a cache and a drafter of its own, so callers may use the Spec meanwhile;
    they take turns with the engine, a cycle each. In asyncio use `generate` and `stream`.
    Call `close`, or use the engine in a `with` block.

    Attributes:
        spec: The engine's own Spec, with the parts of the one it was given.
        batch: The most requests that run at a time.
        queue: The most requests that wait.
        columns: Positions of keys and values for the running requests together; None: no limit.
        stretch: Prompt tokens that are prefilled between two cycles; adapted to the cycles' time.
        steps: How many steps have begun and ended; while requests run, it stays the same only if a step hangs.
        failure: What ended the thread, in words; None while it runs, and after `close`.
    """

    def __init__(
        self, spec: Spec, *, batch: int = 8, queue: int = 64, columns: int | None = None
    ) -> None:
        """Start the thread.

        Args:
            spec: Target, drafter, tree and verifier. No weights are copied.
            batch: The most requests that run at a time. Default: 8.
            queue: The most requests that wait for a place in the batch. Default: 64.
            columns: Positions of keys and values that the running requests may take together, each
                row counted as long as the longest (prompt and max_new_tokens). Default: what fits in
                a quarter of the free memory, less the recurrent states of a full batch; no limit on
                devices that do not report their free memory.

        Raises:
            InputError: For a number out of range.
        """
        # 1. Limits.
        self.spec = spec.new()
        self.batch = require_whole_number("batch", batch, least=1)
        self.queue = require_whole_number("queue", queue, least=0)
        self.decoder = self.spec.decoder
        self.stretch = 128
        with alone_with(self.decoder.models):
            self.spec.measure()
            if columns is None:
                self.columns = free_columns(spec.target, self.batch)
            else:
                self.columns = require_whole_number("columns", columns, least=1)
        decoder_batch = self.decoder.batch
        decoder_batch.prefix_cache.limit = self.batch
        decoder_batch.columns = self.columns

        # 2. Requests, and the thread that answers them.
        end_workers()
        self._changed = Condition()  # guards the fields below
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._answers: dict[Request, Completion] = {}  # of waiting and running requests
        self._other_decoders: dict[Request, Decoder] = {}  # of requests with a Spec of their own
        self._turns: dict[str, int] = {}  # by caller: the number of its latest request to enter
        self._entered = 0
        self._closed = False
        self.steps = 0
        self.failure: str | None = None
        self._thread = Thread(target=self._run_thread, name="treespec-engine", daemon=True)
        self._thread.start()
        # A thread that computes must not outlive the interpreter.
        atexit.register(self.close, False)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finish=kind is None)

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def submit(
        self,
        prompt: Prompt,
        *,
        seed: Seed = None,
        on_piece: OnPiece | None = None,
        caller: str = "",
        spec: Spec | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """Queue a request. prompt, seed, options: as for `Spec.stream`.

        on_piece: called on the engine's thread with each piece, and with None at the end, also
        after an error or `cancel`; it must return soon.
        caller: who asks; callers enter the batch in turns.
        spec: another Spec of the same target that decodes this request, in turns with the engine's own;
        None: the engine's own.
        Raises InputError for bad input, for a request that needs more than `columns`, and after
        `close`; Busy if the queue is full.
        """
        on_pieces = [on_piece]
        answers = self.submit_n(
            prompt, 1, seed=seed, on_pieces=on_pieces, caller=caller, spec=spec, **options
        )
        return answers[0]

    async def generate(
        self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[RequestKeywords]
    ) -> Output:
        """Answer a prompt in asyncio: `await engine.generate(prompt)`. The event loop goes on meanwhile.

        prompt, seed, options: as for `Spec.stream`. If the task is cancelled, so is the answer.
        Raises what `submit` raises, and the error that ended the answer.
        """
        async with self.stream(prompt, seed=seed, **options) as stream:
            async for _ in stream:
                pass
            return stream.output

    def stream(
        self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[RequestKeywords]
    ) -> AsyncStream:
        """Begin an answer in asyncio: `async for piece in engine.stream(prompt)`.

        prompt, seed, options: as for `Spec.stream`. To leave early, use it in an `async with` block.
        Raises what `submit` raises, and RuntimeError without a running event loop.
        """
        return AsyncStream(
            lambda on_piece: self.submit(prompt, seed=seed, on_piece=on_piece, **options)
        )

    def submit_n(
        self,
        prompt: Prompt,
        n: int,
        *,
        seed: Seed = None,
        on_pieces: Sequence[OnPiece | None] | None = None,
        caller: str = "",
        spec: Spec | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Queue n requests for one prompt, which is prefilled once. If they do not all fit, none is queued.

        seed: of the first request; each next one has the next seed. on_pieces: `on_piece` of each.
        The other arguments and errors are those of `submit`.
        """
        # 1. The requests, on the caller's thread.
        n = require_whole_number("n", n, least=1)
        requests = (spec or self.spec).requests(prompt, n, seed=seed, **options)
        if self.columns is not None and requests[0].columns > self.columns:
            raise InputError(
                f"the prompt and max_new_tokens take {requests[0].columns} positions, the memory for "
                f"keys and values holds {self.columns}: shorten the prompt or lower max_new_tokens"
            )
        if not on_pieces:
            on_pieces = [None] * n
        answers: dict[Request, Completion] = {}
        for request, on_piece in zip(requests, on_pieces, strict=True):
            request.caller = caller
            answers[request] = Completion(request, on_piece)

        # 2. Queue all of them, if there is room.
        with self._changed:
            pending = len(self._answers)
            limit = self.batch + self.queue
            if self._closed:
                raise InputError("the engine is closed: begin another")
            if pending + n > limit:
                raise Busy(
                    f"{pending} requests run and wait, at most {limit} may: try again later, or "
                    "begin the engine with a longer queue"
                )
            self._waiting += requests
            self._answers |= answers
            if spec is not None:
                self._other_decoders |= dict.fromkeys(requests, spec.decoder)
            self._changed.notify_all()
        return list(answers.values())

    def close(self, finish: bool = True, seconds: float | None = None) -> bool:
        """Refuse further requests, and wait for the thread to end. Returns whether it has ended.

        finish: whether to answer all requests first. Otherwise the cycle that runs is the last, and
        each unfinished answer raises an InputError.
        seconds: the longest wait. Default: None, until it ends.
        """
        with self._changed:
            self._closed = True
            if not finish:
                end_requests(self._answers, InputError("the engine was closed"))
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join(seconds)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    def _run_thread(self) -> None:
        """Run the engine's thread. If an error ends it, all answers get that error: no caller waits for ever."""
        try:
            self._run_cycles()
        except BaseException as error:
            with self._changed:
                self._closed = True
                self.failure = f"the engine failed: {error!r}"
                answers = self._answers
                self._answers = {}
            end_requests(answers, InputError(f"the engine failed: {error!r}"))
            for answer in answers.values():
                answer.end()
            raise

    @torch.inference_mode()
    def _run_cycles(self) -> None:
        """Decode cycle after cycle, until the engine is closed and all requests have ended."""
        while True:
            # 1. Requests leave the queue while the batch has room.
            with self._changed:
                self._changed.wait_for(self._has_work)
                if not self._answers:
                    return
                entering = self._pop_entering()

            # 2. A cycle of each decoder, and its pieces.
            for decoder in self._list_decoders():
                for request, piece in self._run_cycle(decoder, entering):
                    self._answers[request].take(piece)

            # 3. Requests that have ended, in the queue too.
            for answer in self._remove_ended():
                answer.end()
            batch = self.decoder.batch
            if not self._running and (batch.requests or batch.prefilling):
                # Free the rows of requests that were cancelled since the cycle.
                self._run_cycle(self.decoder, [])

    def _pop_entering(self) -> list[Request]:
        """Take the requests that may enter now off the queue, callers in turns; they run from now on."""
        if self._waiting and len(self._running) < self.batch:
            self._waiting = order_by_turns(self._waiting, self._running, self._turns)
        entering = pop_admissible(self._waiting, self._running, self.batch, self.columns)
        self._running += entering
        for request in entering:
            self._entered += 1
            self._turns[request.caller] = self._entered
        return entering

    def _find_decoder(self, request: Request) -> Decoder:
        """The decoder of a request: the engine's, or that of the request's own Spec."""
        return self._other_decoders.get(request, self.decoder)

    def _select(self, requests: Iterable[Request], decoder: Decoder) -> list[Request]:
        """The requests that a decoder runs."""
        return [request for request in requests if self._find_decoder(request) is decoder]

    def _list_decoders(self) -> list[Decoder]:
        """The decoders of the requests that run."""
        return list(dict.fromkeys(map(self._find_decoder, self._running)))

    def _has_work(self) -> bool:
        """Whether the thread must wake up: requests run or wait, or the engine is closed."""
        return bool(self._answers) or self._closed

    def _remove_ended(self) -> list[Completion]:
        """Forget the requests that have ended, and return their answers."""
        answers = []
        with self._changed:
            for request in list(self._answers):
                if request.ended:
                    answers.append(self._answers.pop(request))
            self._waiting = deque(request for request in self._waiting if not request.ended)
            self._running = [request for request in self._running if not request.ended]
            for request in list(self._other_decoders):
                if request not in self._answers:
                    del self._other_decoders[request]
            callers = {request.caller for request in self._answers}
            self._turns = {name: turn for name, turn in self._turns.items() if name in callers}
        return answers

    def _run_cycle(
        self, decoder: Decoder, entering: Sequence[Request]
    ) -> list[tuple[Request, Piece]]:
        """Run one step of a decoder. An error, of any kind, ends all requests that it runs.

        entering: requests that enter now; those of other decoders are left to them.
        """
        batch = decoder.batch
        decoder.stretch = IDLE_CHUNK_TOKENS
        if batch.running:
            decoder.stretch = self.stretch
        self.steps += 1
        try:
            with alone_with(decoder.models):
                pieces = decoder.run_step(self._select(entering, decoder))
        except BaseException as error:  # SystemExit too: the thread goes on for later requests
            if not isinstance(error, Exception):
                error = InputError(f"the engine failed: {error!r}")
            end_requests(self._select(self._running, decoder), error)
            return []
        finally:
            self.steps += 1
        if pieces and batch.prefilling and decoder is self.decoder:
            self._adapt_stretch()
        return pieces

    def _adapt_stretch(self) -> None:
        """Adapt the prompt tokens prefilled between two cycles, so that they take as long as about two cycles."""
        prefill_seconds, cycle_seconds = self.decoder.seconds
        stretch = self.stretch
        if prefill_seconds > 3 * cycle_seconds:
            stretch = stretch // 2
        elif prefill_seconds < 1.5 * cycle_seconds:
            stretch = stretch * 2
        self.stretch = min(max(stretch, MIN_PREFILL_TOKENS), PREFILL_CHUNK_TOKENS)


def end_requests(requests: Iterable[Request], error: Exception) -> None:
    """Store an error in each request that has none, which ends it."""
    for request in requests:
        if request.error is None:
            request.error = error
