"""Grammars of answers: a JSON schema, a regular expression or a Lark grammar, compiled by llguidance.

Compiled grammars and llguidance's copies of tokenizers are cached, so a schema that many requests share is
compiled once. A `GrammarSandbox` compiles each grammar in a process of its own first, and follows it for a
few tokens there: a grammar that crashes llguidance, or keeps it busy, ends that process and not its parent.
"""

import json
import random
import re
import signal
import threading
import time
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, final

from treespec.errors import InputError, Unavailable, describe_os_error
from treespec.files.pauses import pause

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_LLGUIDANCE = "answers by a grammar need llguidance: pip install llguidance"
GRAMMAR_KINDS = ("json_schema", "regex", "grammar")
# They bound the time of a token and the memory of a matcher, far above what common schemas need.
MATCHER_LIMITS: Any = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
}
MATCHER_LIMITS |= {"verbose_errors": False}
# JSON as json.dumps writes it. With one way to space there are fewer choices and more forced tokens.
JSON_SPACING: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@final
@dataclass(frozen=True)
class Grammar:
    """A compiled grammar over a tokenizer.

    Attributes:
        kind: One of GRAMMAR_KINDS.
        start: The matcher before the first token. It never consumes a token itself: take copies.
        ends: The tokens that end an answer. The matcher allows them once the grammar accepts the answer.
    """

    kind: str
    start: "LLMatcher"
    ends: frozenset[int]


def compile_grammar(
    kind: str, source: object, tokenizer: Any, vocab_size: int, ends: frozenset[int]
) -> Grammar:
    """Compile the grammar of an answer.

    Args:
        kind: One of GRAMMAR_KINDS.
        source: A JSON schema as a dict or as JSON text, a regular expression, or a grammar in
            llguidance's Lark.
        tokenizer: The target's, of transformers.
        vocab_size: V of the target.
        ends: The tokens that end an answer.

    Raises:
        InputError: For a source that cannot be compiled, and for a tokenizer that llguidance cannot copy.
    """
    text = to_grammar_text(kind, source)
    llg_tokenizer = copy_tokenizer(tokenizer, vocab_size, ends)
    return Grammar(kind, build_start_matcher(kind, text, llg_tokenizer), ends)


def to_grammar_text(kind: str, source: object) -> str:
    """Write the source as text. Raises InputError for the wrong type, and for a schema that is no JSON."""
    if kind == "json_schema":
        try:
            schema = source
            if isinstance(source, str):
                schema = json.loads(source)
            if schema is True:  # any JSON
                schema = {}
            source = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is no JSON text: {error}") from None
        if not isinstance(schema, dict):
            raise InputError(f"json_schema is {schema!r:.40}, must be an object")
    if not isinstance(source, str):
        raise InputError(f"{kind} is {source!r:.40}, must be a string")
    if re.search("[\ud800-\udfff]", source):
        raise InputError(f"{kind} holds half of a surrogate pair, which is no character")
    return source


def check_syntax(kind: str, source: object) -> None:
    """Check a grammar without a tokenizer; kind, source: as for `compile_grammar`.

    A Lark grammar that names special tokens, such as <|think|>, passes: only a tokenizer knows them.

    Raises: InputError for a source that no tokenizer can follow, and if llguidance is not installed.
    """
    text = to_grammar_text(kind, source)
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InputError(NO_LLGUIDANCE) from None
    if kind == "grammar" and "<" in text:
        return
    fault = LLMatcher.validate_grammar(build_llg_grammar(kind, text))
    if fault:
        raise InputError(f"{kind}: {' '.join(fault.split())}")


def build_llg_grammar(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's form. Raises InputError for one that is too large."""
    from llguidance import LLMatcher

    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, JSON_SPACING)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise InputError(f"{kind} is too large: {error}") from None


@lru_cache(maxsize=4)
def copy_tokenizer(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> "LLTokenizer":
    """Build llguidance's copy of a tokenizer. Raises InputError for one that it cannot copy."""
    if tokenizer is None:
        raise InputError("the target has no tokenizer: a grammar needs the text of its tokens")
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"a grammar needs a fast tokenizer (tokenizer.json), the target's is a {name}: convert "
            "it, or leave the option out"
        )
    if not ends:
        raise InputError(
            "a grammar needs a token that ends the answer: set eos_token_id in the target's "
            "generation_config.json"
        )
    try:
        from llguidance import LLTokenizer

        return LLTokenizer(**copy_of(tokenizer, vocab_size, ends))
    except ImportError:
        raise InputError(NO_LLGUIDANCE) from None
    except (ValueError, RuntimeError) as error:
        raise InputError(f"llguidance cannot read the target's {name}: {error}") from error


def copy_of(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> dict[str, Any]:
    """Build the arguments of llguidance's copy of a tokenizer, which can be sent to another process."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    size = max(vocab_size, len(tokenizer), 1 + max(ends, default=-1))
    return {"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": sorted(ends)}


@lru_cache(maxsize=64)
def build_start_matcher(kind: str, text: str, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Compile a grammar to its matcher before the first token. Raises InputError if no token may come first."""
    from llguidance import LLMatcher, LLParserLimits

    # 1. The matcher. It compiles without Python's interpreter lock, so other threads go on.
    grammar = build_llg_grammar(kind, text)
    start = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**MATCHER_LIMITS))

    # 2. Errors of compilation, and of the first token's mask.
    fault = start.get_error()
    if fault:
        raise InputError(f"{kind}: {' '.join(fault.split())}")
    first = start.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise build_complexity_error(kind, first)
    return start


def build_complexity_error(kind: str, matcher: "LLMatcher") -> InputError:
    """Build the error of a matcher that has stopped with an error."""
    fault = matcher.get_error()
    if "NoExtension" in fault:
        return InputError(f"{kind} cannot be satisfied: no token may come next")
    return InputError(f"{kind} is too complex to be followed: {' '.join(fault.split())}")


MAX_GRAMMAR_CHARACTERS = 1 << 17
MAX_COMPILE_SECONDS = 5.0  # the sandbox is killed if a grammar takes longer
PAUSE_SECONDS = 0.05  # between two looks whether the grammar is still wanted
MAX_START_SECONDS = 60.0
MAX_TOKEN_SECONDS = 0.1  # CPU seconds of one token: other threads of the parent wait for a part
TRIAL_TOKEN_COUNT = 16  # random tokens by which the sandbox follows a grammar
STACK_BYTES = 2 << 20  # less than the parent's threads have: a grammar that passes here fits there


@final
class GrammarSandbox:
    """A process that tries grammars over one tokenizer. One thread at a time may use it.

    The process starts with the first grammar, and again after a grammar has ended it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> None:
        """tokenizer, vocab_size, ends: as for `compile_grammar`.

        The tokenizer is copied now, before there are requests: a large copy holds up other threads.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.ends = ends
        with suppress(InputError):  # raised again for the first request with a grammar
            copy_tokenizer(tokenizer, vocab_size, ends)
        self.pipe: Connection | None = None
        self.process: SpawnProcess | None = None
        self.check = lru_cache(maxsize=64)(self._check)

    def run(self, kind: str, source: object) -> None:
        """Check a grammar; kind, source: as for `compile_grammar`. It pauses while the process works.

        Raises InputError for a grammar that `compile_grammar` refuses, and for one that takes too long;
        Unavailable if the process cannot start.
        """
        text = to_grammar_text(kind, source)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InputError(
                f"{kind} has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} are taken"
            )
        copy_tokenizer(self.tokenizer, self.vocab_size, self.ends)
        self.check(kind, text)

    def _check(self, kind: str, text: str) -> None:
        if self.pipe is None:
            self._begin()
        assert self.pipe
        try:
            self.pipe.send((kind, text))
            fault = self._receive(MAX_COMPILE_SECONDS)
        except (EOFError, OSError):
            self._end()
            fault = f"{kind} is too complex to be compiled: give a simpler one"
        except BaseException:  # of `pause`: nobody waits for this grammar any more
            self._end()
            raise
        if fault:
            raise InputError(fault)

    def _receive(self, seconds: float) -> str:
        """Wait for the process's next message, and pause meanwhile. Raises TimeoutError, an OSError."""
        assert self.pipe
        end = time.monotonic() + seconds
        while not self.pipe.poll(PAUSE_SECONDS):
            pause()
            if time.monotonic() > end:
                raise TimeoutError
        return str(self.pipe.recv())

    def _begin(self) -> None:
        """Start the process. Raises Unavailable if it cannot start."""
        fields = copy_of(self.tokenizer, self.vocab_size, self.ends)
        context = get_context("spawn")
        try:
            self.pipe, child_pipe = context.Pipe()
            self.process = context.Process(target=_serve, args=(child_pipe, fields), daemon=True)
            with child_pipe:
                self.process.start()
            self._receive(MAX_START_SECONDS)  # "ready"
        except BaseException as error:
            self._end()
            if not isinstance(error, EOFError | OSError):
                raise
            reason = "it ended"
            if isinstance(error, OSError):
                reason = describe_os_error(error)
            raise Unavailable(
                f"the process that tries grammars cannot start ({reason}): try again later, or ask without one"
            ) from error

    def _end(self) -> None:
        """End the process; the next grammar starts another one."""
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = None
        self.process = None


def _serve(pipe: Connection, fields: dict[str, Any]) -> None:
    """Run the sandbox's process: receive a grammar, send its fault or "", until the parent is gone."""
    from llguidance import LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    tokenizer = LLTokenizer(**fields)

    def loop() -> None:
        pipe.send("ready")
        with suppress(EOFError):
            while True:
                kind, text = pipe.recv()
                pipe.send(_find_fault(kind, text, tokenizer))

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=loop).start()


def _find_fault(kind: str, text: str, tokenizer: "LLTokenizer") -> str:
    """Compile a grammar and let it consume a few random tokens. Returns what is wrong with it, or ""."""
    try:
        matcher = build_start_matcher(kind, text, tokenizer).deep_copy()
        generator = random.Random(0)
    except InputError as error:
        return str(error)
    for _ in range(TRIAL_TOKEN_COUNT):
        start = time.thread_time()
        matcher.compute_ff_tokens()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowing_bytes = [index for index, byte in enumerate(mask) if byte]
        index = generator.choice(allowing_bytes)
        token = 8 * index + mask[index].bit_length() - 1
        if token in tokenizer.eos_tokens:
            break
        matcher.consume_token(token)
        if time.thread_time() - start > MAX_TOKEN_SECONDS:
            return f"{kind} is too complex: a token takes longer than {MAX_TOKEN_SECONDS:g} s"
    if matcher.is_error():
        return str(build_complexity_error(kind, matcher))
    return ""
