"""The source only grows easier to read: counts fall, and functions that were split stay split."""

import ast

import pytest
from reading_counts import ROOT, complexity, count_rates, count_tree

LIMITS = {  # today's counts; lower them as the counts fall
    "functions whose name begins with no verb": 100,
    "module-level names with several definitions": 11,
    "constants of one word": 18,
    "tuple assignments of literals": 0.3,
    "starred expressions": 5.5,
    "conditional expressions": 2,
    "and/or as a value": 7.8,
    "comprehensions": 25.2,
    "walruses": 0.2,
}
COMPLEX_FUNCTIONS = (ROOT / "tests" / "complex_functions.txt").read_text(encoding="utf-8").split()


@pytest.fixture(scope="module")
def counts():
    return count_tree(ROOT)


def test_no_count_of_dense_code_rises(counts):
    rates = count_rates(counts)
    assert rates.keys() == LIMITS.keys()
    assert not {words: number for words, number in rates.items() if number > LIMITS[words]}


def test_no_new_function_has_a_complexity_over_12(counts):
    """A function that falls below leaves the list, so that it cannot return."""
    assert sorted(name_place(place) for _, place in counts.complex_functions) == COMPLEX_FUNCTIONS


def name_place(place: str) -> str:
    """`file.py:12 function` without the line, so that a line above changes nothing."""
    location, function = place.split(" ")
    return f"{location.rpartition(':')[0]}:{function}"


EXAMPLE = """
def total(rows):
    if not rows and len(rows) > 1:
        return [x for x in rows if x]
    return sum(1 if row else 2 for row in rows)
"""


def test_complexity_counts_what_an_expression_hides():
    (function,) = ast.parse(EXAMPLE).body
    # 1, the if, its `and`, two comprehensions, the condition of one, the conditional expression
    assert complexity(function) == 7
