"""The options of a request: how its answer is drawn, where it ends, and what it tells.

`RequestOptions` declares them for Python, the command line, HTTP and the pages alike. It loads no
torch.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from treespec.errors import InputError
from treespec.options import MAX_COUNT, find_nearest_name, option
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS
from treespec.sampling.params import LogitOptions, SamplingParams
from treespec.text.strings import decode_command_line

if TYPE_CHECKING:
    import torch

    from treespec.engine.events import Cycle
    from treespec.sampling.processors import Processor, TreeLogitsProcessor

Seed: TypeAlias = "int | torch.Generator | None"
Seeds: TypeAlias = "Seed | Sequence[Seed]"


def parse_stop_strings(words: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as the command line gives them. Raises InputError."""
    return tuple(decode_command_line(text, "--stop") for text in words)


def parse_template_variables(text: str) -> Any:
    """The variables that a JSON object names. Raises InputError."""
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(
            f"--chat-template-kwargs {text!r:.40} is no JSON object, such as "
            '{"enable_thinking": false}'
        ) from None


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingParams, LogitOptions):
    """stop: a string, or a list of strings; any of them ends the answer.

    json_schema, regex, grammar: what the answer must be, at most one of them: a JSON schema as a
    dict or JSON text, a regular expression, or a grammar in llguidance's Lark. The answer ends
    where nothing may follow.
    memory: requests of one name share their answers. None: drafts come from the text at hand alone,
    as for a sampled answer with a number for a seed in any case.
    on_cycle: is called with each `treespec.engine.events.Cycle` while the decoder waits; an error
    of it ends the answer. For one prompt.
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
        "the answer must be JSON of this schema", None, line=(str, str)
    )
    regex: str | None = option("the answer must match this regular expression", None)
    grammar: str | None = option("the answer must be of this grammar in llguidance's Lark", None)
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
        """Values of other types than numbers and names. Raises InputError."""
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
        """Options that exclude each other. Raises InputError."""
        if self.min_tokens > self.max_new_tokens:
            raise InputError(
                f"{self.format_option_name('min_tokens')} is {self.min_tokens}, must be at most "
                f"{self.format_option_name('max_new_tokens')}, {self.max_new_tokens}"
            )
        forms = [
            self.format_option_name(name)
            for name in GRAMMAR_KINDS
            if getattr(self, name) is not None
        ]
        if len(forms) > 1:
            raise InputError(f"{' and '.join(forms)} are given: leave out all but one")
        if forms and self.ignore_eos:
            raise InputError(
                f"{forms[0]} and {self.format_option_name('ignore_eos')} are given: an end token ends the {forms[0]}"
            )


def has_only_strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


REQUEST_OPTION_NAMES = tuple(known.name for known in fields(RequestOptions))


def parse_request_options(options: Mapping[str, Any], *more: str) -> RequestOptions:
    """The checked options of a request. more: names known besides. Raises InputError."""
    known = REQUEST_OPTION_NAMES + more
    for name in options:
        if name not in known:
            hint = find_nearest_name(name, known)
            raise InputError(f"unknown option {name}{hint}: there are {', '.join(known)}")
    return RequestOptions(
        **{name: value for name, value in options.items() if name in REQUEST_OPTION_NAMES}
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
    """The options of `Spec.generate`: of each answer, and of several together."""

    batch: int | None
    seed: Seeds
