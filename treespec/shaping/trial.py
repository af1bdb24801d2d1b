"""A process that compiles grammars first, and follows each for a few tokens.

A grammar that crashes llguidance, or keeps it busy, ends that process and not its parent.
"""

import random
import signal
import threading
import time
from contextlib import suppress
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, final

from treespec.errors import InputError
from treespec.shaping.compiled import copy_of, start_of, text_of, tokens_of, too_complex

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST = 1 << 17  # characters of a grammar
SECONDS = 5.0  # that the process may take for one
STEP = 0.1  # seconds of CPU for a token: other threads of the parent wait for some of them
TOKENS = 16  # that a grammar is followed for
STACK = 2 << 20  # bytes, less than threads of the parent have: what passes here fits there


@final
class Trial:
    """The process over a tokenizer. It begins with the first grammar, and again after one ended it.

    One thread at a time may use it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> None:
        """As for `compiled`. A large tokenizer is copied now: the copy holds up other threads."""
        self.given = (tokenizer, vocab_size, ends)
        with suppress(InputError):  # a request by grammar will hear of it
            tokens_of("grammar", *self.given)
        self.pipe: Connection | None = None
        self.check = lru_cache(maxsize=64)(self._check)

    def run(self, kind: str, source: object) -> None:
        """Raises InputError for a grammar that `compiled` refuses, and for one that takes too much.

        kind, source: as for `compiled`.
        """
        text = text_of(kind, source)
        if len(text) > MOST:
            raise InputError(f"{kind} has {len(text)} characters, at most {MOST} are taken")
        tokens_of(kind, *self.given)
        self.check(kind, text)

    def _check(self, kind: str, text: str) -> None:
        try:
            if self.pipe is None:
                self._begin()
            assert self.pipe
            self.pipe.send((kind, text))
            if not self.pipe.poll(SECONDS):
                raise TimeoutError
            fault = self.pipe.recv()
        except (EOFError, OSError):
            self.process.kill()
            self.process.join()
            self.pipe = None
            fault = f"{kind} is too complex to be compiled: give a simpler one"
        if fault:
            raise InputError(fault)

    def _begin(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, copy_of(*self.given)), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pipe.recv()  # it is ready


def _serve(pipe: Connection, fields: dict[str, Any]) -> None:
    """The process: take a grammar, send its fault or "", until the parent is gone."""
    from llguidance import LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    tokens = LLTokenizer(**fields)

    def loop() -> None:
        pipe.send("ready")
        with suppress(EOFError):
            while True:
                kind, text = pipe.recv()
                pipe.send(_fault(kind, text, tokens))

    threading.stack_size(STACK)
    threading.Thread(target=loop).start()


def _fault(kind: str, text: str, tokens: "LLTokenizer") -> str:
    """Compile a grammar and let it take a few random tokens. What is wrong with it, or ""."""
    try:
        matcher, coins = start_of(kind, text, tokens).deep_copy(), random.Random(0)
    except InputError as error:
        return str(error)
    for _ in range(TOKENS):
        begun = time.thread_time()
        matcher.compute_ff_tokens()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        place = coins.choice([place for place, byte in enumerate(mask) if byte])
        token = 8 * place + mask[place].bit_length() - 1
        if token in tokens.eos_tokens:
            break
        matcher.consume_token(token)
        if time.thread_time() - begun > STEP:
            return f"{kind} is too complex: a token takes longer than {STEP:g} s"
    return str(too_complex(kind, matcher)) if matcher.is_error() else ""
