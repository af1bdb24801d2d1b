"""One thread owns target and drafter, and decodes the requests of many callers together."""

import atexit
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread, current_thread
from typing import Unpack, final

import psutil
import torch

from treespec.api.spec import Spec
from treespec.engine.batch import ALONE, STRETCH, admitted
from treespec.engine.options import Keywords, Seed
from treespec.engine.output import Completion, OnPiece
from treespec.engine.request import Piece, Request
from treespec.errors import Busy, InputError
from treespec.files.locks import alone_with
from treespec.kernels.workers import end_workers
from treespec.model.target import Target
from treespec.options import whole
from treespec.text.prompts import Prompt

LEAST = 16  # prompt tokens between two cycles


@final
class Engine:
    """Requests enter the running batch between cycles, in the order in which they came.

    Between two cycles a stretch of the prompts is prefilled, which take turns. So a long prompt
    holds nobody up for longer than about two cycles.

    Each has its own options, seed and end. A request that fails or is cancelled leaves after the
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
        counted as long as the longest (prompt and max_new_tokens). Default: what a quarter of the
        memory holds that is free now, less the recurrent states of a full batch; on devices that do
        not tell, no limit.
        Raises InputError for a number out of range.
        """
        # 1. Limits.
        self.spec = spec.new()
        self.batch, self.queue = whole("batch", batch, least=1), whole("queue", queue, least=0)
        self.decoder = self.spec.decoder
        self.stretch = 128
        with alone_with(self.decoder.models):
            self.spec.measure()
            if columns is None:
                self.columns = free_columns(spec.target, self.batch)
            else:
                self.columns = whole("columns", columns, least=1)
        rows = self.decoder.rows
        rows.keep = self.batch
        rows.columns = self.columns

        # 2. Requests, and the thread that answers them.
        end_workers()
        self._changed = Condition()  # guards the fields below
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._answers: dict[Request, Completion] = {}  # of both
        self._closed = False
        self._thread = Thread(target=self._work, name="treespec-engine", daemon=True)
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
        **options: Unpack[Keywords],
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
        **options: Unpack[Keywords],
    ) -> list[Completion]:
        """Queue n requests for one prompt, which is prefilled once: all of them, or none.

        seed: of the first; each other one has the next. on_pieces: `on_piece` of each. The rest is
        as for `submit`.
        """
        # 1. The requests, on the caller's thread.
        texts = self.spec.requests(prompt, whole("n", n, least=1), seed=seed, **options)
        if self.columns is not None and texts[0].columns > self.columns:
            raise InputError(
                f"the prompt and max_new_tokens take {texts[0].columns} positions, the memory for "
                f"keys and values holds {self.columns}: shorten the prompt or lower max_new_tokens"
            )

        # 2. Their places in the queue.
        answers = dict(zip(texts, map(Completion, texts, on_pieces or [None] * n), strict=True))
        with self._changed:
            pending = len(self._answers)
            most = self.batch + self.queue
            if self._closed:
                raise InputError("the engine is closed: begin another")
            if pending + n > most:
                raise Busy(
                    f"{pending} requests run and wait, at most {most} may: try again later, or "
                    "begin the engine with a longer queue"
                )
            self._waiting += texts
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
                for text in self._answers:
                    text.error = text.error or InputError("the engine was closed")
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        """The thread. Whatever ends it, no caller waits for ever."""
        try:
            self._answer_all()
        except BaseException as error:
            with self._changed:
                self._closed = True
                answers = self._answers
                self._answers = {}
            for text, answer in answers.items():
                text.error = text.error or InputError(f"the engine failed: {error!r}")
                answer.end()
            raise

    @torch.inference_mode()
    def _answer_all(self) -> None:
        """A cycle of all running requests after another, until the engine is closed."""
        while True:
            # 1. Requests that there is room for leave the queue.
            with self._changed:
                self._changed.wait_for(lambda: self._answers or self._closed)
                if not self._answers:
                    return
                entering = admitted(self._waiting, self._running, self.batch, self.columns)
                self._running += entering

            # 2. A cycle, and its pieces.
            for text, piece in self._step(entering):
                self._answers[text].take(piece)

            # 3. Requests that have ended, in the queue too.
            with self._changed:
                ended = [self._answers.pop(text) for text in [*self._answers] if text.ended]
                self._waiting = deque(text for text in self._waiting if not text.ended)
                self._running = [text for text in self._running if not text.ended]
            for answer in ended:
                answer.end()
            rows = self.decoder.rows
            if not self._running and (rows.texts or rows.entering):
                self._step([])  # frees the rows of requests that were cancelled since the cycle

    def _step(self, entering: list[Request]) -> list[tuple[Request, Piece]]:
        """A cycle of the decoder. An error of the models ends all requests that run."""
        rows = self.decoder.rows
        self.decoder.stretch = self.stretch if rows.running else ALONE
        try:
            with alone_with(self.decoder.models):
                pieces = self.decoder.step(entering)
        except Exception as error:
            for text in self._running:
                text.error = text.error or error
            return []

        # A stretch of a prompt that goes on takes the time of about two cycles.
        prefill, cycle = self.decoder.seconds
        if pieces and rows.entering:
            factor = 0.5 if prefill > 3 * cycle else 2 if prefill < 1.5 * cycle else 1
            self.stretch = min(max(int(self.stretch * factor), LEAST), STRETCH)
        return pieces


SHARE = 4  # a cache is up to twice as long as its texts, and a change of its rows copies it once


@torch.inference_mode()
def free_columns(target: Target, texts: int = 1) -> int | None:
    """Columns that a quarter of the free memory holds; None where nobody knows how much is free.

    None too for a target without keys and values.

    A column is the keys and values of one position of one text, in all layers. texts: that may run
    at a time; their recurrent states, if the target has any, are taken from the free memory first.
    The caller holds the model.
    """
    # 1. Bytes of a column, from a cache with one token. Recurrent layers alone have none: a text's
    #    state has one size, whatever its length.
    cache = target.new_cache(capacity=1)
    target.prefill(cache, torch.zeros(1, 1, dtype=torch.int64))
    storages = [states[0, :, 0] for layer in cache.tree_layers for states in layer.storage]
    size = sum(states.numel() * states.element_size() for states in storages)

    # 2. Free bytes, where the output layer lies, less the texts' recurrent states.
    free = free_memory_of(target.output_device) if size else None
    return None if free is None else max(free - texts * cache.state_bytes, 0) // (SHARE * size)


def free_memory_of(device: torch.device) -> int | None:
    """Bytes that a device has free; None where its backend does not tell."""
    if device.type == "cpu":
        return free_memory()
    # torch 2.9 may tell of cuda alone.
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
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(limit - used + int(stat["inactive_file"]), 0))
    return free
