"""What a request may ask of the distribution of its tokens. It loads no torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from treespec.errors import InputError
from treespec.options import MAX_COUNT, Options, option, require_whole_number

MIN_TEMPERATURE = 1e-5  # temperature: about the float32 spacing at the size of logits
MAX_TEMPERATURE = 1e30  # temperature: float32 holds it


@dataclass(frozen=True)
class SamplingParams(Options):
    """How logits become the distribution that is sampled, in the order of transformers' warpers.

    temperature: 0 is greedy, a one-hot distribution. So is anything below 1e-5, where rounding of
    float32 logits exceeds their differences.
    """

    PANEL = "Answers"

    temperature: float = option(
        "sampling temperature; 0 is greedy", 0.0, least=0, most=MAX_TEMPERATURE
    )
    top_k: int = option(
        "sample from the k most likely tokens; 0 is off", 0, least=0, most=MAX_COUNT
    )
    top_p: float = option(
        "sample from the most likely tokens that hold this probability; 1 is off",
        1.0,
        above=0,
        most=1,
    )
    min_p: float = option(
        "sample from tokens above this share of the most likely one's probability; 0 is off",
        0.0,
        least=0,
        most=1,
    )

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def parse_bias(words: Sequence[str]) -> dict[int, float]:
    """The biases of `50256=-5` and the like. Raises InputError."""
    biases = {}
    for text in words:
        token, _, value = text.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise InputError(
                f"--logit-bias {text!r:.40} is not understood: give a token id and a number, as in "
                "50256=-5"
            ) from None
    return biases


@dataclass(frozen=True, kw_only=True)
class LogitOptions(Options):
    """What changes the logits of target and drafter alike, in this order, at every node of a tree by
    the node's own path. The text has exactly the distribution of the changed logits.

    logit_bias: {token id: added to its logit}; -inf forbids a token. logits_processor: a
    transformers `LogitsProcessor`, any function like one, a `treespec.sampling.processors.TreeLogitsProcessor`, or
    a list of them. Each must be a function of its arguments.
    """

    PANEL = "Answers"

    logit_bias: Mapping[int, float] | None = option(
        "add a number to a token's logit, as in 50256=-5, or forbid it, as in 50256=-inf; repeat the "
        "option for several tokens",
        None,
        line=(list[str], parse_bias),
    )
    repetition_penalty: float = option(
        "divide by this the positive logits of all tokens of prompt and answer, and multiply their "
        "negative ones; 1 is off",
        1.0,
        least=0.001,
        most=1000,
    )
    presence_penalty: float = option(
        "subtract this from the logits of all tokens of the answer; 0 is off", 0.0, least=-2, most=2
    )
    frequency_penalty: float = option(
        "subtract this from the logits of the answer's tokens, once for each occurrence; 0 is off",
        0.0,
        least=-2,
        most=2,
    )
    logits_processor: Callable[..., Any] | Sequence[Callable[..., Any]] = option(
        "functions of (input_ids, scores) that change the scores", (), line=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        biases = self.logit_bias
        if biases is None:
            return
        if not isinstance(biases, Mapping):
            raise InputError(
                f"logit_bias is {biases!r:.40}, must be a dict of token ids and numbers"
            )
        pairs = [check_bias(token, value) for token, value in biases.items()]
        object.__setattr__(self, "logit_bias", dict(pairs))


def check_bias(token: object, value: Any) -> tuple[int, float]:
    """A token id and its bias. JSON's keys are strings, so the id may be one of digits.

    Raises InputError for what is no token id, and for NaN and infinity.
    """
    if isinstance(token, str) and token.isdecimal():
        token = int(token)
    token_id = require_whole_number("logit_bias: a token id", token, least=0)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value == math.inf:
        raise InputError(
            f"logit_bias of token {token_id} is {value!r:.40}, must be a finite number or -inf"
        )
    return token_id, float(value)
