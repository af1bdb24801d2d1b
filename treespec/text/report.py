"""Which conversations of a source were used, and why others were left out."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from treespec.text.forms import UnusableConversation

SHOWN = 5  # problems kept in a report


@dataclass
class Report:
    """Counts: conversations used, those of them that were cut, and those left out by reason.

    thoughtless: answers of used conversations that do not count, as the template drops their
    thoughts.
    """

    used: int = 0
    cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # the first few, with file and line
    thoughtless: int = 0

    def leave_out(self, where: str, error: UnusableConversation) -> None:
        self.left_out[error.reason] += 1
        if len(self.problems) < SHOWN:
            self.problems.append(f"{where}: {error}")

    def __str__(self) -> str:
        cut = f", {self.cut} of them cut at the maximal length" if self.cut else ""
        counts = [f"{reason}: {count}" for reason, count in self.left_out.most_common()]
        reasons = f" ({'; '.join(counts)})" if counts else ""
        dropped = f"; the template drops the thoughts of {self.thoughtless} further answers"
        dropped = f"{dropped}, which do not count" if self.thoughtless else ""
        return (
            f"{self.used} conversations used{cut}, {self.left_out.total()} left out{reasons}"
            f"{dropped}"
        )

    def add(self, other: "Report") -> None:
        """Count what a later part of the data adds."""
        self.used += other.used
        self.cut += other.cut
        self.left_out += other.left_out
        self.problems = (self.problems + other.problems)[:SHOWN]
        self.thoughtless += other.thoughtless

    def fields(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return vars(self) | {"left_out": dict(self.left_out)}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Report":
        """A report from its fields, as JSON holds them."""
        return cls(**fields | {"left_out": Counter(fields["left_out"])})
