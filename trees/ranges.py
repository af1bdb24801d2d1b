"""The range of an option's number: finite, between two bounds."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A range of finite numbers; None is no bound.

    least, most: bounds that belong to the range. above, below: bounds that do not.
    whole: whether only whole numbers belong to it.
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
        """Whether a number fits the bounds."""
        if self.least is not None and value < self.least:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.most is not None and value > self.most:
            return False
        return self.below is None or value < self.below

    def parse(self, text: str) -> float:
        """The number that a text writes, which need not belong to the range. Raises ValueError."""
        if self.whole:
            return int(text)
        return float(text)

    @property
    def bounds(self) -> str:
        """Such as `1 to 64`, or `above 0 and below 1`."""
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

    def __str__(self) -> str:
        kind = "a number"
        if self.whole:
            kind = "a whole number"
        if self.least is not None and self.most is not None:
            return f"{kind} from {self.bounds}"
        return f"{kind} {self.bounds}"


# Nodes of a tree, root included; a mask has the square of their number.
NODES_RANGE = Range(least=2, most=4096, whole=True)
# Levels of drafted tokens; the draft model runs once for each.
DEPTH_RANGE = Range(least=1, most=64, whole=True)
# Children of a node.
CHILDREN_RANGE = Range(least=1, most=256, whole=True)


def format_bound(number: float) -> str:
    """A bound as people read it: 1,000,000 or 0.001."""
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:g}"
