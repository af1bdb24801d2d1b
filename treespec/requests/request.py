"""The options of `generate` and `stream`: how an answer is drawn, and where it ends."""

import difflib
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
import torch

from treespec.errors import InputError
from treespec.shaping.compiled import KINDS
from treespec.shaping.processors import Bias, Processor, Shaper, shapers_of
from treespec.shaping.processors import whole as whole
from treespec.shaping.sampling import SamplingParams

if TYPE_CHECKING:
    from treespec.requests.events import Cycle

Seed: TypeAlias = int | torch.Generator | None
Seeds: TypeAlias = Seed | Sequence[Seed]


class Options(TypedDict, total=False):
    """temperature: 0, the default, is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.

    max_new_tokens: at least 1, default 256. stop: a string, or a list of strings; any of them ends
    the answer.
    min_tokens: before the answer has them no end token is sampled, and no stop string ends it.
    ignore_eos: end tokens do not end the answer.

    These change the logits, in this order, at every node of a tree by the node's own path; the text
    has exactly the law of the changed logits (`treespec.shaping`):
    logit_bias: {token id: added to its logit}; -inf forbids a token.
    repetition_penalty: of the tokens of prompt and answer; 1 is off. presence_penalty,
    frequency_penalty: of the answer's tokens, from -2 to 2; 0 is off (`treespec.shaping.processors`).
    logits_processor: a transformers `LogitsProcessor`, any function like one, a
    `treespec.shaping.processors.Shaper`, or a list of them. Each must be a function of its arguments.
    json_schema, regex, grammar: what the answer must be, at most one of them: a JSON schema as a
    dict or JSON text, a regular expression, or a grammar in llguidance's Lark. The answer ends
    where nothing may follow.

    logprobs: give the log-probability of each token. top_logprobs: and of so many likeliest tokens
    (`treespec.decoding.sequence.TokenLogprob`).
    chat_template_kwargs: variables for the chat template of messages, such as enable_thinking.
    memory: for `--drafter suffix`, whose answers to draft from: requests of one name share theirs,
    default "". None: from the text at hand alone, as a sampled answer with a number for a seed is in
    any case. remember: whether this answer joins them, default True.
    on_cycle: is called with each `treespec.requests.events.Cycle` while the decoder waits; an error of it
    ends the answer. For one prompt.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    stop: str | Sequence[str]
    min_tokens: int
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logits_processor: Processor | Shaper | Sequence[Processor | Shaper]
    json_schema: Mapping[str, object] | str | bool
    regex: str
    grammar: str
    logprobs: bool
    top_logprobs: int
    chat_template_kwargs: Mapping[str, object]
    memory: str | None
    remember: bool
    on_cycle: "Callable[[Cycle], object]"


class BatchOptions(Options, total=False):
    """The options of `Spec.generate`: of each answer, and of several together."""

    batch: int | None
    seed: Seeds


OPTIONS = tuple(Options.__annotations__)


def refuse_unknown(options: Mapping[str, object], *more: str) -> None:
    """Raises InputError for an unknown option. more: names known besides those of `Options`."""
    known = (*OPTIONS, *more)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {close[0]}?" if close else ":"
            raise InputError(f"unknown option {name}{hint} There are {', '.join(known)}")


@dataclass(frozen=True)
class Checked:
    """Checked options. stop: strings; any of them ends the answer.

    shapers: in order, none of which has begun. grammar: what the answer must be: the option's name
    and its value; None: anything. top_logprobs: None where no log-probabilities are asked for.
    """

    params: SamplingParams
    stop: tuple[str, ...]
    max_new_tokens: int
    min_tokens: int
    ignore_eos: bool
    shapers: tuple[Shaper, ...]
    grammar: tuple[str, object] | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, object]
    memory: str | None
    remember: bool
    on_cycle: "Callable[[Cycle], object] | None"

    @property
    def largest_token(self) -> int:
        """The largest token id among the biases, -1 without any."""
        biases = [shaper for shaper in self.shapers if isinstance(shaper, Bias)]
        return max((token for bias in biases for token in bias.tokens), default=-1)


DRAWN = ("temperature", "top_k", "top_p", "min_p")  # options that `SamplingParams` checks


def checked(options: Options) -> Checked:
    """Raises InputError for an option of the wrong type or out of range."""
    # 1. How tokens are drawn.
    named: dict[str, Any] = {name: v for name, v in options.items() if name in DRAWN}
    params = SamplingParams(**named)

    # 2. Where the answer ends.
    most = whole("max_new_tokens", options.get("max_new_tokens", 256), least=1)
    least = whole("min_tokens", options.get("min_tokens", 0), least=0)
    if least > most:
        raise InputError(f"min_tokens is {least}, must be at most max_new_tokens, {most}")
    beyond, grammar = _flag("ignore_eos", options.get("ignore_eos", False)), _grammar(options)
    if beyond and grammar:
        raise InputError(
            f"{grammar[0]} and ignore_eos are given: an end token ends the {grammar[0]}"
        )

    # 3. What it tells, and what the template is told.
    tops = whole("top_logprobs", options.get("top_logprobs", 0), least=0)
    told = _flag("logprobs", options.get("logprobs", False)) or tops > 0
    return Checked(
        params,
        _strings(options.get("stop", ())),
        most,
        least,
        beyond,
        tuple(shapers_of(options)),
        grammar,
        tops if told else None,
        _variables(options.get("chat_template_kwargs", {})),
        _checked("memory", options.get("memory", ""), str | None, "a string or None"),
        _flag("remember", options.get("remember", True)),
        _checked("on_cycle", options.get("on_cycle"), Callable | None, "a function"),
    )


def _grammar(options: Mapping[str, object]) -> tuple[str, object] | None:
    asked_for = [(name, options[name]) for name in KINDS if options.get(name) is not None]
    if len(asked_for) > 1:
        names = " and ".join(name for name, _ in asked_for)
        raise InputError(f"{names} are given: leave out all but one")
    return asked_for[0] if asked_for else None


def _variables(given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f"chat_template_kwargs is {given!r:.40}, must be a dict of named values")
    return given


def _flag(name: str, value: object) -> bool:
    return bool(_checked(name, value, bool | np.bool_, "True or False"))


def _checked(name: str, value: object, kind: Any, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{name} is {value!r:.40}, must be {wanted}")
    return value


def _strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence) or isinstance(stop, bytes | bytearray | memoryview):
        raise InputError(f"stop is {stop!r:.40}, must be a string or a list of strings")
    for place, string in enumerate(stop, 1):
        if not isinstance(string, str):
            raise InputError(f"stop string {place} is {string!r:.40}, must be a string")
    return tuple(stop)


def generator_of(seed: int, prompt: Sequence[int], device: torch.device) -> torch.Generator:
    """The generator of a completion's draws: a function of the seed and the prompt's token ids.

    Its own seed is BLAKE2b, in 8 bytes, of both as little-endian words of 8 bytes. So one seed for
    all prompts gives draws that are independent of each other, the same on every machine. On a CPU
    torch takes 32 bits of it: two prompts share their draws with probability 2^-32.
    """
    words = np.array([seed, *prompt], dtype="<u8").tobytes()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def seed_of(value: object) -> int:
    """A seed in [0, 2^64). None and a generator draw one. Raises InputError."""
    if value is None:
        return secrets.randbits(63)
    if isinstance(value, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=value, device=value.device))
    seed = whole("seed", value)
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, must lie in [0, 2^64)")
    return seed


def seeds_of(value: Seeds, prompts: int, each: int = 1) -> list[Seed]:
    """A seed for each prompt, from the first prompt's seed or a list of them. Raises InputError.

    each: successive seeds that a prompt takes.
    """
    if isinstance(value, torch.Generator | None):
        return [value] * prompts
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != prompts:
            raise InputError(
                f"there are {len(value)} seeds for {prompts} prompts: give one seed, or one for "
                "each"
            )
        return list(value)
    first = whole("seed", value)
    return [first + i * each for i in range(prompts)]
