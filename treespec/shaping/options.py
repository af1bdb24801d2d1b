"""The shapers that a request asks for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from treespec.errors import InputError
from treespec.shaping.bias import Bias
from treespec.shaping.penalties import Counts, Penalties
from treespec.shaping.processors import Processed
from treespec.shaping.shaper import Shaper


def shapers_of(options: Mapping[str, Any]) -> Iterator[Shaper]:
    """The shapers that options ask for, in the order in which they act; none has begun.

    transformers and vLLM add biases before they penalise, too. Raises InputError for an option of
    the wrong type or out of range. options: see `treespec.requests.request.Options`.
    """
    bias = _bias(options.get("logit_bias", {}))
    if bias.tokens:
        yield bias
    penalties = Penalties(
        _in_range("repetition_penalty", options.get("repetition_penalty", 1.0), 1e-3, 1e3),
        _in_range("presence_penalty", options.get("presence_penalty", 0.0), -2, 2),
        _in_range("frequency_penalty", options.get("frequency_penalty", 0.0), -2, 2),
    )
    if penalties != Penalties():
        yield Counts(penalties)
    given = options.get("logits_processor", ())
    for place, one in enumerate(given if isinstance(given, Sequence) else [given], 1):
        if isinstance(one, Shaper):
            yield one
        elif callable(one):
            yield Processed(one)
        else:
            raise InputError(
                f"logits_processor {place} is {one!r:.40}, must be a function of token ids and "
                "scores"
            )


def _bias(given: object) -> Bias:
    if not isinstance(given, Mapping):
        raise InputError(f"logit_bias is {given!r:.40}, must be a dict of token ids and numbers")
    values: dict[int, float] = {}
    for token, value in given.items():
        named = int(token) if isinstance(token, str) and token.isdecimal() else token
        place = whole("a token id of logit_bias", named, least=0)
        bias = values[place] = real(f"logit_bias of token {place}", value)
        if math.isnan(bias) or bias == math.inf:
            raise InputError(f"logit_bias of token {place} is {bias}, must be finite or -inf")
    return Bias(tuple(values), tuple(values.values()))


def _in_range(name: str, value: object, least: float, most: float) -> float:
    number = real(name, value)
    if not least <= number <= most:
        raise InputError(f"{name} is {value}, must lie in [{least:g}, {most:g}]")
    return number


def whole(name: str, value: object, least: int | None = None) -> int:
    """Raises InputError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r:.40}, must be a whole number")
    if least is not None and value < least:
        raise InputError(f"{name} is {value}, must be at least {least}")
    return int(value)


def real(name: str, value: object) -> float:
    """Raises InputError for anything but a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {value!r:.40}, must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # out of every range
