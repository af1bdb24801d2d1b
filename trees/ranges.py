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
        return (
            isinstance(value, int if self.whole else int | float)
            and not isinstance(value, bool)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and math.isfinite(value)
        )

    @property
    def bounds(self) -> str:
        """Such as `1 to 64`, or `above 0 and below 1`."""
        if self.least is not None and self.most is not None:
            return f"{written(self.least)} to {written(self.most)}"
        lower = {"at least": self.least, "above": self.above}
        upper = {"at most": self.most, "below": self.below}
        ends = (lower | upper).items()
        return " and ".join(f"{word} {written(end)}" for word, end in ends if end is not None)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        closed = self.least is not None and self.most is not None
        return f"{kind} {'from ' if closed else ''}{self.bounds}"


# Nodes of a tree, root included; a mask has the square of their number.
NODES = Range(least=2, most=4096, whole=True)
# Levels of drafted tokens; the draft model runs once for each.
DEPTH = Range(least=1, most=64, whole=True)
# Children of a node.
CHILDREN = Range(least=1, most=256, whole=True)


def written(number: float) -> str:
    """A bound as people read it: 1,000,000 or 0.001."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
