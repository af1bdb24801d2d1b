"""Grammars of answers: a JSON schema, a regular expression or a grammar, compiled by llguidance.

Compiled grammars and the tokenizers behind them are kept, so a schema that many requests share is
compiled once.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

from treespec.errors import InputError
from treespec.shaping.schema_place import broken_place

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "regex", "grammar")
# JSON as json.dumps writes it. One way to space means fewer tokens to choose, and more forced ones.
SPACING: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@final
@dataclass(frozen=True)
class Grammar:
    """A compiled grammar over a tokenizer. start: the matcher before the first token; never moved.

    ends: the tokens that end an answer; the matcher allows them where the grammar accepts.
    """

    start: "LLMatcher"
    ends: frozenset[int]

    def matcher(self) -> "LLMatcher":
        """A matcher for one text."""
        return self.start.deep_copy()


def compiled(
    kind: str, source: object, tokenizer: Any, vocab_size: int, ends: frozenset[int]
) -> Grammar:
    """The grammar of an answer.

    kind: one of KINDS. source: a JSON schema as a dict or as JSON text; a regular expression;
    or a grammar in llguidance's Lark. vocab_size: V of the target. Raises InputError
    for a source that cannot be used, with the place of the fault, and for a target whose tokenizer
    cannot be matched.
    """
    text = _text(kind, source)
    tokens = _tokens(kind, tokenizer, vocab_size, ends)
    return Grammar(_start(kind, text, tokens), ends)


def _text(kind: str, source: object) -> str:
    """The source as text. Raises InputError for the wrong type and for text that is no JSON."""
    if kind != "json_schema":
        if not isinstance(source, str):
            raise InputError(f"{kind} is {source!r:.40}, must be a string")
        if not source.isascii() and any("\ud800" <= letter <= "\udfff" for letter in source):
            raise InputError(f"{kind} holds half of a surrogate pair, which is no character")
        return source
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise InputError(f"json_schema is no JSON: {error}") from None
    if source is False:
        raise InputError("json_schema is false, which no answer satisfies: give a schema")
    if source is True:
        source = {}
    if not isinstance(source, dict):
        raise InputError(f"json_schema is {source!r:.40}, must be an object")
    try:
        return json.dumps(source, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"json_schema cannot be written as JSON: {error}") from None


def _tokens(kind: str, tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> "LLTokenizer":
    """llguidance's copy of the tokenizer. Raises InputError for one that it cannot copy."""
    if tokenizer is None:
        raise InputError(f"the target has no tokenizer: {kind} needs the text of its tokens")
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise InputError(
            f"{kind} needs a fast tokenizer (tokenizer.json), the target's is a {name}: convert it, "
            "or leave the option out"
        )
    if not ends:
        raise InputError(
            f"{kind} needs a token that ends the answer: set eos_token_id in the target's "
            "generation_config.json"
        )
    return _copied(tokenizer, vocab_size, ends)


@lru_cache(maxsize=4)
def _copied(tokenizer: Any, vocab_size: int, ends: frozenset[int]) -> "LLTokenizer":
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise InputError(
            "answers by a grammar need llguidance: pip install 'treespec[grammar]'"
        ) from None
    size = max(vocab_size, len(tokenizer), *(token + 1 for token in ends))
    try:
        return from_tokenizer(tokenizer, size, sorted(ends))
    except (ValueError, RuntimeError) as error:
        name = type(tokenizer).__name__
        raise InputError(f"llguidance cannot read the target's {name}: {error}") from error


@lru_cache(maxsize=64)
def _start(kind: str, text: str, tokens: "LLTokenizer") -> "LLMatcher":
    """The matcher of a grammar before the first token. Raises InputError for a broken one."""
    from llguidance import LLMatcher

    # 1. As llguidance's grammar.
    write: dict[str, Callable[[str], str]] = {
        "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(schema, SPACING),
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    grammar = write[kind](text)

    # 2. Where it is broken, the place of the fault.
    if fault := LLMatcher.validate_grammar(grammar, tokens):

        def fault_of(schema: object) -> str:
            return LLMatcher.validate_grammar(write[kind](json.dumps(schema)), tokens)

        if kind == "json_schema":
            place = broken_place(json.loads(text), fault, fault_of)
            raise InputError(f"json_schema at {place}: {_reason(fault)}")
        raise InputError(f"{kind}: {_reason(fault)}{_line_and_column(kind, fault)}")

    # 3. The matcher.
    start = LLMatcher(tokens, grammar, log_level=0)
    if start.is_error():
        raise InputError(f"{kind} is too large: {_reason(start.get_error())}")
    return start


def _reason(fault: str) -> str:
    """One line of llguidance's message, without places: those of its own files mislead."""
    lines = fault.splitlines()
    inner = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = inner[0] if inner else re.sub(r"^(at )?\d+\(\d+\): ", "", lines[0])
    return line[:1].lower() + line[1:]


def _line_and_column(kind: str, fault: str) -> str:
    """Where the fault is, by llguidance's message. A caret marks the column of a regex's fault."""
    carets = [line for line in fault.splitlines() if line.strip(" ^") == "" and "^" in line]
    if kind == "regex":
        column = carets[0].index("^") - 3 if carets else 0  # the regex is indented by 4
        return f" at character {column}" if column > 0 else ""
    at = re.match(r"(?:at )?(\d+)\((\d+)\)", fault)
    return f" at line {at[1]}, column {at[2]}" if at else ""
