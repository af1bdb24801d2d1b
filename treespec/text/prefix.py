"""The common beginning of two texts."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many tokens or characters they share before they part; either may be the longer one."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
