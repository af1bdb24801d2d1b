"""The options of a request: how its answer is sampled, what ends it, and what is reported.

`RequestOptions` declares them once for Python, the command line, HTTP and the pages. This module does not
import torch.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from treespec.engine.synonyms import rename_keywords, suggest_option
from treespec.errors import InputError
from treespec.files.distribution import check_extra
from treespec.options import MAX_COUNT, option
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS
from treespec.sampling.params import LogitOptions, SamplingParams
from treespec.text.strings import decode_command_line, is_file, read_option_text

if TYPE_CHECKING:
    import torch

    from treespec.engine.events import Cycle
    from treespec.sampling.processors import Processor, TreeLogitsProcessor

log = logging.getLogger(__name__)

Seed: TypeAlias = "int | torch.Generator | None"
Seeds: TypeAlias = "Seed | Sequence[Seed]"


def parse_stop_strings(words: Sequence[str]) -> tuple[str, ...]:
    """Decode the stop strings of a command line. Raises InputError."""
    return tuple(decode_command_line(word, "--stop") for word in words)


def parse_template_variables(text: str) -> Any:
    """Parse the JSON object of `--chat-template-kwargs`. Raises InputError."""
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(
            f"--chat-template-kwargs {text!r:.40} is no JSON object, such as "
            '{"enable_thinking": false}'
        ) from None


def read_schema(text: str) -> str:
    """Read `--json-schema`: JSON text, or a file of it. Raises InputError for a value that is neither."""
    if is_file(text):
        text = read_option_text("--json-schema", text)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--json-schema {text!r:.60} is neither a file nor JSON text: {error}"
        ) from None
    return text


def read_pattern(option: str, text: str) -> str:
    """Read `--regex` or `--grammar`: its text, or a file of it. A warning says that a file was read."""
    if not is_file(text):
        return text
    log.warning("%s is read from the file %s", option, text)
    return read_option_text(option, text).rstrip("\n")


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingParams, LogitOptions):
    """Options of one request. Those of sampling are in `SamplingParams` and `LogitOptions`.

    Attributes:
        max_new_tokens: The most tokens of the answer.
        stop: A string, or a list of strings; any of them ends the answer.
        min_tokens: The answer does not end before it has this number of tokens.
        ignore_eos: Whether the answer goes on after end-of-sequence tokens.
        json_schema: The answer must match this JSON schema, a dict or JSON text. At most one of
            json_schema, regex and grammar is given. The answer ends once nothing may follow.
        regex: The answer must match this regular expression.
        grammar: The answer must match this grammar in llguidance's Lark.
        chat_template_kwargs: Variables for the chat template.
        logprobs: Whether to return the log-probability of each token.
        top_logprobs: How many most likely tokens to return with each.
        memory: Requests with the same name are drafted from each other's answers. None: the drafter uses
            only this request's prompt and answer, as it does for every sampled request with an integer seed.
        remember: Whether this answer joins that memory.
        on_cycle: Called with each `treespec.engine.events.Cycle` while the decoder waits. If it raises,
            the answer ends. For one prompt only.
    """

    PANEL = "Answers"

    max_new_tokens: int = option(
        "end an answer after this number of tokens", 256, least=1, most=MAX_COUNT
    )
    stop: str | Sequence[str] = option(
        "end an answer before this text; repeat the option for several texts",
        (),
        line=(list[str], parse_stop_strings),
    )
    min_tokens: int = option(
        "go on until an answer has this number of tokens", 0, least=0, most=MAX_COUNT
    )
    ignore_eos: bool = option("go on after end-of-sequence tokens", False)
    json_schema: Mapping[str, object] | str | bool | None = option(
        "the answer must be JSON of this schema; the command line takes a file, too",
        None,
        line=(str, read_schema),
    )
    regex: str | None = option(
        "the answer must match this regular expression; the command line takes a file, too",
        None,
        line=(str, partial(read_pattern, "--regex")),
    )
    grammar: str | None = option(
        "the answer must be of this grammar in llguidance's Lark; the command line takes a file, too",
        None,
        line=(str, partial(read_pattern, "--grammar")),
    )
    chat_template_kwargs: Mapping[str, object] | None = option(
        'variables for the chat template, as in {"enable_thinking": false}',
        None,
        line=(str, parse_template_variables),
    )
    logprobs: bool = option("give the log-probability of each token", False, line=None)
    top_logprobs: int = option(
        "and those of this number of most likely tokens", 0, least=0, most=MAX_COUNT, line=None
    )
    memory: str | None = option("for --drafter suffix: whose answers to draft from", "", line=None)
    remember: bool = option("whether this answer joins them", True, line=None)
    on_cycle: "Callable[[Cycle], object] | None" = option(
        "is called with each cycle", None, line=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_types()
        self._check_exclusions()

    def _check_types(self) -> None:
        """Check the fields that are neither numbers nor names. Raises InputError."""
        variables = self.chat_template_kwargs
        if variables and not (isinstance(variables, Mapping) and has_only_strings(variables)):
            raise InputError(
                f"chat_template_kwargs is {variables!r:.40}, must be a dict of named values"
            )
        if self.on_cycle and not callable(self.on_cycle):
            raise InputError(f"on_cycle is {self.on_cycle!r:.40}, must be a function")
        stop = self.stop
        if isinstance(stop, str):
            stop = [stop]
        if not isinstance(stop, Sequence) or not has_only_strings(stop):
            raise InputError(f"stop is {stop!r:.40}, must be a string or a list of strings")
        object.__setattr__(self, "stop", tuple(stop))

    def _check_exclusions(self) -> None:
        """Refuse options that exclude each other. Raises InputError."""
        if self.min_tokens > self.max_new_tokens:
            raise InputError(
                f"{self.format_option_name('min_tokens')} is {self.min_tokens}, must be at most "
                f"{self.format_option_name('max_new_tokens')}, {self.max_new_tokens}"
            )
        grammars = [
            self.format_option_name(name)
            for name in GRAMMAR_KINDS
            if getattr(self, name) is not None
        ]
        if len(grammars) > 1:
            raise InputError(f"{' and '.join(grammars)} are given: leave out all but one")
        if grammars:
            check_extra("grammar", grammars[0])
        if grammars and self.ignore_eos:
            ignore_eos = self.format_option_name("ignore_eos")
            raise InputError(
                f"{grammars[0]} and {ignore_eos} are given: an end token ends the {grammars[0]}"
            )


def has_only_strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


REQUEST_OPTION_NAMES = tuple(field.name for field in fields(RequestOptions))


def parse_request_options(options: Mapping[str, Any], *other_names: str) -> RequestOptions:
    """Check the options of a request. Raises InputError, for an unknown name with the nearest known one.

    other_names: names that the error lists too, and that are left out of the result.
    """
    valid_names = REQUEST_OPTION_NAMES + other_names
    renamed = rename_keywords(options, valid_names)
    for name in renamed:
        if name not in valid_names:
            hint = suggest_option(name, valid_names, flag="")
            if not hint:
                hint = f": there are {', '.join(valid_names)}"
            raise InputError(f"no option {name}{hint}")
    return RequestOptions(
        **{name: value for name, value in renamed.items() if name in REQUEST_OPTION_NAMES}
    )


class RequestKeywords(TypedDict, total=False):
    """The fields of `RequestOptions` as keywords, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logits_processor: "Processor | TreeLogitsProcessor | Sequence[Processor | TreeLogitsProcessor]"
    max_new_tokens: int
    stop: str | Sequence[str]
    min_tokens: int
    ignore_eos: bool
    json_schema: Mapping[str, object] | str | bool
    regex: str
    grammar: str
    chat_template_kwargs: Mapping[str, object]
    logprobs: bool
    top_logprobs: int
    memory: str | None
    remember: bool
    on_cycle: "Callable[[Cycle], object]"


class BatchKeywords(RequestKeywords, total=False):
    """The options of `Spec.generate`: those of each answer, and those of the batch."""

    batch: int | None
    seed: Seeds
