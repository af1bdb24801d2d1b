"""The common beginning of two texts."""

from collections.abc import Sequence
from itertools import takewhile


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of tokens or characters at the start that both share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
