"""Exact match on the final number of an answer.

Like the `flexible-extract` filter of lm-evaluation-harness for GSM8K, it takes the last number
that the answer holds, without dollar signs, commas between thousands and a full stop behind it.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import final

# 18, -3, 1,000, $2.50; the minus of 7-3 is no sign
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


@final
@dataclass(frozen=True)
class NumberCheck:
    """answer: a text that ends with the right number. Raises ValueError if it has none."""

    answer: str
    runs_code = False

    def __post_init__(self) -> None:
        if last_number(self.answer) is None:
            raise ValueError(f"`check` of kind number: no number in {self.answer!r}")

    def right(self, answer: str) -> bool:
        """Whether an answer's last number is the right one: 18, 18.00 and $18 are the same."""
        return last_number(answer) == last_number(self.answer)


def last_number(text: str) -> Decimal | None:
    """The last number that a text holds."""
    found = NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", found[-1])) if found else None
