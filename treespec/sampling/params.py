"""The options of a request that change the distribution of its tokens. This module does not import torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from treespec.errors import InputError
from treespec.options import MAX_COUNT, Options, option, require_whole_number

MIN_TEMPERATURE = 1e-5  # about the float32 spacing at the size of logits
MAX_TEMPERATURE = 1e30  # float32 can represent it


@dataclass(frozen=True)
class SamplingParams(Options):
    """How logits become the distribution that is sampled, in the order of transformers' warpers.

    Attributes:
        temperature: The logits are divided by it. Default: 0, greedy: a one-hot distribution. Anything
            below 1e-5 is greedy too, because rounding of float32 logits exceeds the differences left.
        top_k: Only the k most likely tokens are sampled. Default: 0, off.
        top_p: Only the most likely tokens that together have this probability are sampled. Default: 1, off.
        min_p: Only tokens with at least this share of the largest probability are sampled. Default: 0, off.
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
        """Whether the most likely token is taken instead of a sample."""
        return self.temperature < MIN_TEMPERATURE


def parse_bias(words: Sequence[str]) -> dict[int, float]:
    """Parse biases such as `50256=-5`. Raises InputError."""
    biases = {}
    for word in words:
        token, _, value = word.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise InputError(
                f"--logit-bias {word!r:.40} is not understood: give a token id and a number, as in "
                "50256=-5"
            ) from None
    return biases


@dataclass(frozen=True, kw_only=True)
class LogitOptions(Options):
    """What changes the logits of target and drafter, in this order, at each node of a tree by the node's path.

    The answer has exactly the distribution of the changed logits.

    Attributes:
        logit_bias: {token id: number added to its logit}; -inf forbids a token.
        repetition_penalty: Divides the positive logits of tokens in prompt and answer, and multiplies
            their negative ones. Default: 1, off.
        presence_penalty: Subtracted from the logits of the answer's tokens. Default: 0, off.
        frequency_penalty: Subtracted from them once for each occurrence. Default: 0, off.
        logits_processor: A transformers `LogitsProcessor`, any function with the same arguments, a
            `treespec.sampling.processors.TreeLogitsProcessor`, or a list of them. Each must be a pure
            function of its arguments.
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
        checked_biases = [check_bias(token, value) for token, value in biases.items()]
        object.__setattr__(self, "logit_bias", dict(checked_biases))


def check_bias(token: object, value: Any) -> tuple[int, float]:
    """Check a token id and its bias. The id may be a string of digits, because JSON's keys are strings.

    Raises InputError for anything else than a token id, and for NaN and infinity.
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
