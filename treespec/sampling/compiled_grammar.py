"""Grammars of answers: a JSON schema, a regular expression or a grammar, compiled by llguidance.

Compiled grammars and the tokenizers behind them are kept, so a schema that many requests share is
compiled once. A `GrammarSandbox` is a process that compiles grammars first, and follows each for a few tokens: a
grammar that crashes llguidance, or keeps it busy, ends that process and not its parent.
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
from typing import TYPE_CHECKING, Any, final

from treespec.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_KINDS = ("json_schema", "regex", "grammar")
# Far beyond what schemas in use need. They bound the time of a token and the memory of a matcher.
MATCHER_LIMITS: Any = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
}
MATCHER_LIMITS |= {"verbose_errors": False}
# JSON as json.dumps writes it. One way to space means fewer tokens to choose, and more forced ones.
JSON_SPACING: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@final
@dataclass(frozen=True)
class Grammar:
    """A compiled grammar over a tokenizer. kind: one of KINDS.

    start: the matcher before the first token; never moved. ends: the tokens that end an answer; the
    matcher allows them where the grammar accepts.
    """

    kind: str
    start: "LLMatcher"
    ends: frozenset[int]


def compile_grammar(
    kind: str, source: object, tokenizer: Any, vocab_size: int, ends: frozenset[int]
) -> Grammar:
    """The grammar of an answer.

    kind: one of KINDS. source: a JSON schema as a dict or as JSON text; a regular expression;
    or a grammar in llguidance's Lark. vocab_size: V of the target. Raises InputError
    for a source that cannot be used, and for a target whose tokenizer cannot be matched.
    """
    text = to_grammar_text(kind, source)
    return Grammar(
        kind, build_start_matcher(kind, text, copy_tokenizer(tokenizer, vocab_size, ends)), ends
    )


def to_grammar_text(kind: str, source: object) -> str:
    """The source as text. Raises InputError for the wrong type and for text that is no JSON."""
    if kind == "json_schema":
        try:
            schema = source
            if isinstance(source, str):
                schema = json.loads(source)
            if schema is True:  # any JSON
                schema = {}
            source = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InputError(f"json_schema is {schema!r:.40}, must be an object")
    if not isinstance(source, str):
        raise InputError(f"{kind} is {source!r:.40}, must be a string")
    if re.search("[\ud800-\udfff]", source):
        raise InputError(f"{kind} holds half of a surrogate pair, which is no character")
    return source


@lru_cache(maxsize=4)
def copy_tokenizer(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> "LLTokenizer":
    """llguidance's copy of the tokenizer. Raises InputError for one that it cannot copy."""
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
        raise InputError(
            "answers by a grammar need llguidance: pip install 'treespec[grammar]'"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise InputError(f"llguidance cannot read the target's {name}: {error}") from error


def copy_of(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> dict[str, Any]:
    """The arguments of llguidance's copy of a tokenizer; another process may take them, too."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    size = max(vocab_size, len(tokenizer), 1 + max(ends, default=-1))
    return {"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": sorted(ends)}


@lru_cache(maxsize=64)
def build_start_matcher(kind: str, text: str, tokens: "LLTokenizer") -> "LLMatcher":
    """The matcher of a grammar before the first token. Raises InputError for one without use."""
    from llguidance import LLMatcher, LLParserLimits

    # 1. The matcher. It compiles without the interpreter's lock, so other threads go on.
    try:
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text, JSON_SPACING)
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise InputError(f"{kind} is too large: {error}") from None
    start = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**MATCHER_LIMITS))

    # 2. What is wrong with it, if anything.
    fault = start.get_error()
    if fault:
        raise InputError(f"{kind}: {' '.join(fault.split())}")
    first = start.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise build_complexity_error(kind, first)
    return start


def build_complexity_error(kind: str, matcher: "LLMatcher") -> InputError:
    """Why a matcher has given up."""
    fault = matcher.get_error()
    if "NoExtension" in fault:
        return InputError(f"{kind} cannot be satisfied: no token may come next")
    return InputError(f"{kind} is too complex to be followed: {' '.join(fault.split())}")


MAX_GRAMMAR_CHARACTERS = 1 << 17  # characters of a grammar
MAX_COMPILE_SECONDS = 5.0  # that the process may take for one
MAX_TOKEN_SECONDS = (
    0.1  # seconds of CPU for a token: other threads of the parent wait for some of them
)
TRIAL_TOKEN_COUNT = 16  # that a grammar is followed for
STACK_BYTES = 2 << 20  # bytes, less than threads of the parent have: what passes here fits there


@final
class GrammarSandbox:
    """The process over a tokenizer. It begins with the first grammar, and again after one ended it.

    One thread at a time may use it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> None:
        """As for `compile_grammar`. A large tokenizer is copied now: the copy holds up other threads."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.ends = ends
        with suppress(InputError):  # a request by grammar will hear of it
            copy_tokenizer(tokenizer, vocab_size, ends)
        self.pipe: Connection | None = None
        self.check = lru_cache(maxsize=64)(self._check)

    def run(self, kind: str, source: object) -> None:
        """Raises InputError for a grammar that `compile_grammar` refuses, and for one that takes too much.

        kind, source: as for `compile_grammar`.
        """
        text = to_grammar_text(kind, source)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InputError(
                f"{kind} has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} are taken"
            )
        copy_tokenizer(self.tokenizer, self.vocab_size, self.ends)
        self.check(kind, text)

    def _check(self, kind: str, text: str) -> None:
        try:
            if self.pipe is None:
                self._begin()
            assert self.pipe
            self.pipe.send((kind, text))
            if not self.pipe.poll(MAX_COMPILE_SECONDS):
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
        self.pipe, child_pipe = context.Pipe()
        fields = copy_of(self.tokenizer, self.vocab_size, self.ends)
        self.process = context.Process(target=_serve, args=(child_pipe, fields), daemon=True)
        self.process.start()
        child_pipe.close()
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
                pipe.send(_find_fault(kind, text, tokens))

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=loop).start()


def _find_fault(kind: str, text: str, tokens: "LLTokenizer") -> str:
    """Compile a grammar and let it take a few random tokens. What is wrong with it, or ""."""
    try:
        matcher = build_start_matcher(kind, text, tokens).deep_copy()
        coins = random.Random(0)
    except InputError as error:
        return str(error)
    for _ in range(TRIAL_TOKEN_COUNT):
        begun = time.thread_time()
        matcher.compute_ff_tokens()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowing = [place for place, byte in enumerate(mask) if byte]
        place = coins.choice(allowing)
        token = 8 * place + mask[place].bit_length() - 1
        if token in tokens.eos_tokens:
            break
        matcher.consume_token(token)
        if time.thread_time() - begun > MAX_TOKEN_SECONDS:
            return f"{kind} is too complex: a token takes longer than {MAX_TOKEN_SECONDS:g} s"
    if matcher.is_error():
        return str(build_complexity_error(kind, matcher))
    return ""
