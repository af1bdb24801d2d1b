"""The allowed range of an option's number."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A range of finite numbers.

    Attributes:
        least, most: inclusive bounds; None: unbounded.
        above, below: exclusive bounds; None: unbounded.
        whole: whether only integers belong to the range.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.whole and not isinstance(value, int):
            return False
        return self._is_within(value) and math.isfinite(value)

    def _is_within(self, value: float) -> bool:
        """Whether a number lies between the bounds."""
        if self.least is not None and value < self.least:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.most is not None and value > self.most:
            return False
        return self.below is None or value < self.below

    def parse(self, text: str) -> float:
        """Converts text to a number, without checking that it is in the range. Raises ValueError."""
        if self.whole:
            return int(text)
        return float(text)

    @property
    def bounds(self) -> str:
        """The bounds in words, such as `1 to 64` or `above 0 and below 1`."""
        if self.least is not None and self.most is not None:
            return f"{format_bound(self.least)} to {format_bound(self.most)}"
        ends = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        parts = [f"{word} {format_bound(end)}" for word, end in ends.items() if end is not None]
        return " and ".join(parts)

    def describe(self, number: object) -> str:
        """Describes the range for a number outside of it: without an end that no one reaches, unless it was passed."""
        if self.least is None or self.most is None or self.most < UNREACHED_END:
            return str(self)
        is_number = isinstance(number, int | float)
        if isinstance(number, int | float) and number > self.most:
            return str(self)
        least = f"{format_bound(self.least)} or more"
        if self.whole:
            return f"a whole number, {least}"
        if not is_number:
            return f"a number, {least}"
        return least

    def __str__(self) -> str:
        kind = "a number"
        if self.whole:
            kind = "a whole number"
        if self.least is not None and self.most is not None:
            return f"{kind} from {self.bounds}"
        return f"{kind} {self.bounds}"


UNREACHED_END = 10**9  # ends from here on are not shown
# Nodes of a tree, root included. A mask has N² entries.
NODES_RANGE = Range(least=2, most=4096, whole=True)
# Levels of drafted tokens; the draft model runs once for each.
DEPTH_RANGE = Range(least=1, most=64, whole=True)
# Children of a node.
CHILDREN_RANGE = Range(least=1, most=256, whole=True)


def format_bound(number: float) -> str:
    """Formats a bound for people: 1,000,000 or 0.001."""
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:g}"
