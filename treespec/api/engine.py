"""One thread owns target and drafter, and decodes the requests of many callers together."""

import atexit
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread, current_thread
from typing import Unpack, final

import psutil
import torch

from treespec.api.spec import Spec
from treespec.engine.batch import IDLE_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, pop_admissible
from treespec.engine.options import RequestKeywords, Seed
from treespec.engine.output import Completion, OnPiece
from treespec.engine.request import Piece, Request
from treespec.errors import Busy, InputError
from treespec.files.locks import alone_with
from treespec.kernels.workers import end_workers
from treespec.model.target import Target
from treespec.options import require_whole_number
from treespec.text.prompts import Prompt

MIN_PREFILL_TOKENS = 16  # prompt tokens between two cycles


@final
class Engine:
    """Decodes the requests of many callers together, on a thread of its own.

    Requests enter the running batch between cycles, in the order in which they came. Between two
    cycles a chunk of one prompt is prefilled, and the prompts take turns: so a long prompt holds
    nobody up for longer than about two cycles.

    Each request has its own options, seed and end. One that fails or is cancelled leaves after the
    present cycle, and the others do not notice. An error of the models ends all requests that run;
    the next ones start again.
    The engine decodes with a cache and drafter of its own, so the Spec stays free for its callers;
    they take turns with the engine, a cycle each. `close` it, or use it in a `with` block.
    """

    def __init__(
        self, spec: Spec, *, batch: int = 8, queue: int = 64, columns: int | None = None
    ) -> None:
        """batch: requests that run at a time. queue: requests that may wait beside them.

        columns: positions of keys and values that the running requests may take together, each row
        counted as long as the longest (prompt and max_new_tokens). Default: as many as a quarter of
        the free memory holds, less the recurrent states of a full batch; no limit on devices that do
        not tell how much is free.
        Raises InputError for a number out of range.
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
        rows = self.decoder.batch
        rows.keep = self.batch
        rows.columns = self.columns

        # 2. Requests, and the thread that answers them.
        end_workers()
        self._changed = Condition()  # guards the fields below
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._answers: dict[Request, Completion] = {}  # of both
        self._closed = False
        self._thread = Thread(target=self._run_thread, name="treespec-engine", daemon=True)
        self._thread.start()
        # A thread that computes must not outlive the interpreter.
        atexit.register(self.close, False)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finish=kind is None)

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
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """Queue a request. prompt, seed, options: as for `Spec.stream`.

        on_piece: called on the engine's thread with each piece, and with None at the end, also
        after an error or `cancel`; it must return soon.
        Raises InputError for bad input, for a request that the memory never holds and after
        `close`; Busy when the queue is full.
        """
        return self.submit_n(prompt, 1, seed=seed, on_pieces=[on_piece], **options)[0]

    def submit_n(
        self,
        prompt: Prompt,
        n: int,
        *,
        seed: Seed = None,
        on_pieces: Sequence[OnPiece | None] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Queue n requests for one prompt, which is prefilled once: all of them, or none.

        seed: of the first; each other one has the next. on_pieces: `on_piece` of each. The rest is
        as for `submit`.
        """
        # 1. The requests, on the caller's thread.
        n = require_whole_number("n", n, least=1)
        requests = self.spec.requests(prompt, n, seed=seed, **options)
        if self.columns is not None and requests[0].columns > self.columns:
            raise InputError(
                f"the prompt and max_new_tokens take {requests[0].columns} positions, the memory for "
                f"keys and values holds {self.columns}: shorten the prompt or lower max_new_tokens"
            )
        if not on_pieces:
            on_pieces = [None] * n
        answers: dict[Request, Completion] = {}
        for request, on_piece in zip(requests, on_pieces, strict=True):
            answers[request] = Completion(request, on_piece)

        # 2. Their places in the queue.
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
            self._changed.notify_all()
        return list(answers.values())

    def close(self, finish: bool = True) -> None:
        """Take no more requests and end the thread.

        finish: answer all requests first. Otherwise the present cycle is the last, and each
        unfinished answer raises an InputError.
        """
        with self._changed:
            self._closed = True
            if not finish:
                end_requests(self._answers, InputError("the engine was closed"))
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run_thread(self) -> None:
        """The thread. Whatever ends it, no caller waits for ever."""
        try:
            self._run_cycles()
        except BaseException as error:
            with self._changed:
                self._closed = True
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
            # 1. Requests leave the queue as far as there is room.
            with self._changed:
                self._changed.wait_for(self._has_work)
                if not self._answers:
                    return
                entering = pop_admissible(self._waiting, self._running, self.batch, self.columns)
                self._running += entering

            # 2. A cycle, and its pieces.
            for request, piece in self._run_cycle(entering):
                self._answers[request].take(piece)

            # 3. Requests that have ended, in the queue too.
            for answer in self._remove_ended():
                answer.end()
            batch = self.decoder.batch
            if not self._running and (batch.requests or batch.prefilling):
                self._run_cycle(
                    []
                )  # frees the rows of requests that were cancelled since the cycle

    def _has_work(self) -> bool:
        """Whether the thread need not wait: requests run or wait, or the engine is closed."""
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
        return answers

    def _run_cycle(self, entering: list[Request]) -> list[tuple[Request, Piece]]:
        """A cycle of the decoder. An error of the models ends all requests that run."""
        batch = self.decoder.batch
        self.decoder.stretch = IDLE_CHUNK_TOKENS
        if batch.running:
            self.decoder.stretch = self.stretch
        try:
            with alone_with(self.decoder.models):
                pieces = self.decoder.run_step(entering)
        except Exception as error:
            end_requests(self._running, error)
            return []
        if pieces and batch.prefilling:
            self._adapt_stretch()
        return pieces

    def _adapt_stretch(self) -> None:
        """Let the next stretch of a prompt take the time of about two cycles."""
        prefill_seconds, cycle_seconds = self.decoder.seconds
        stretch = self.stretch
        if prefill_seconds > 3 * cycle_seconds:
            stretch = stretch // 2
        elif prefill_seconds < 1.5 * cycle_seconds:
            stretch = stretch * 2
        self.stretch = min(max(stretch, MIN_PREFILL_TOKENS), PREFILL_CHUNK_TOKENS)


def end_requests(requests: Iterable[Request], error: Exception) -> None:
    """End requests by an error, those excepted that have one already."""
    for request in requests:
        if request.error is None:
            request.error = error


PREFILL_SHARE = (
    4  # a cache is up to twice as long as its texts, and a change of its rows copies it once
)


@torch.inference_mode()
def free_columns(target: Target, texts: int = 1) -> int | None:
    """Columns that a quarter of the free memory holds; None if nobody knows how much is free.

    None too for a target without keys and values.

    A column is the keys and values of one position of one text, in all layers. texts: the most that
    run at a time; their recurrent states, if the target has any, are taken from the free memory first.
    The caller holds the model.
    """
    # 1. Bytes of a column, from a cache with one token. With recurrent layers only there are none:
    #    a text's state has one size, whatever its length.
    cache = target.build_cache(capacity=1)
    target.prefill(cache, torch.zeros(1, 1, dtype=torch.int64))
    column_bytes = 0
    for layer in cache.tree_layers:
        for states in layer.storage:
            column_bytes += states[0, :, 0].numel() * states.element_size()
    if not column_bytes:
        return None

    # 2. Free bytes, where the output layer lies, less the texts' recurrent states.
    free_bytes = free_memory_of(target.output_device)
    if free_bytes is None:
        return None
    free_bytes = max(free_bytes - texts * cache.state_bytes, 0)
    return free_bytes // (PREFILL_SHARE * column_bytes)


def free_memory_of(device: torch.device) -> int | None:
    """Bytes that a device has free; None if its backend does not tell."""
    if device.type == "cpu":
        return free_memory()
    # torch 2.9 may tell of cuda only.
    tell = getattr(torch.accelerator, "get_memory_info", torch.cuda.mem_get_info)
    with suppress(RuntimeError, ValueError, AssertionError):  # no such call, or another backend
        return int(tell(device)[0])
    return None


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the machine has free, and the process's control group (a container's), if fewer.

    A group counts cached pages of files as used; those that are not in use are free all the same.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no group, or one without a limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = {}
        for line in (group / "memory.stat").read_text().splitlines():
            name, number = line.split()
            stat[name] = number
        free = min(free, max(limit - used + int(stat["inactive_file"]), 0))
    return free
