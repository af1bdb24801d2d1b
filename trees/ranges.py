"""The range of a number that people give: finite, between two bounds."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """least and most belong to the range, above and below do not. whole: only whole numbers do."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """Such as `1 to 64`, or `above 0 and below 1`."""
        if self.least is not None and self.most is not None:
            return f"{written(self.least)} to {written(self.most)}"
        words = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return " and ".join(
            f"{word} {written(bound)}" for word, bound in words.items() if bound is not None
        )

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} {'from ' if self.least is not None and self.most is not None else ''}{self.bounds}"


NODES = Range(least=2, most=4096, whole=True)  # of any tree, root too: a mask has their square
DEPTH = Range(
    least=1, most=64, whole=True
)  # levels: the draft model runs once for each, one after another
CHILDREN = Range(least=1, most=256, whole=True)


def written(number: float) -> str:
    """1,000,000 or 0.001."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def outside(options: Any, **ranges: Range) -> str | None:
    """An error text for the first field of `options` that lies outside its range; None if all fit."""
    for name, allowed in ranges.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            return f"{name} is {value}, must be {allowed}"
    return None
