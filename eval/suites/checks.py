"""Checks: whether a completion is right. A question's line of JSONL has one as its field `check`."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import final

from treespec.eval.suites.sandbox import check_works, runs

# 18, -3, 1,000, $2.50; the minus of 7-3 is no sign
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)  # of Markdown, closed or cut off


@final
@dataclass(frozen=True)
class NumberCheck:
    """Exact match on the final number of a completion.

    Like the `flexible-extract` filter of lm-evaluation-harness for GSM8K, it takes the last number
    of the text, without dollar signs, commas between thousands and a full stop after it.
    answer: a text that ends with the right number. Raises ValueError if it has none.
    """

    answer: str
    runs_code = False

    def __post_init__(self) -> None:
        if last_number(self.answer) is None:
            raise ValueError(f"`check` of kind number: no number in {self.answer!r}")

    def right(self, text: str) -> bool:
        """Whether the last number of a text is the right one: 18, 18.00 and $18 are the same."""
        return last_number(text) == last_number(self.answer)


def last_number(text: str) -> Decimal | None:
    """The last number in a text."""
    numbers = NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


@final
@dataclass(frozen=True)
class PythonCheck:
    """Unit tests on the code of a completion: pass@1 of one sample (Chen et al. 2021, 2107.03374).

    prompt: what the function begins with, up to its docstring. test: code that defines `check`.
    entry_point: the function's name, which `check` is called with.
    """

    prompt: str
    test: str
    entry_point: str
    runs_code = True

    def right(self, text: str) -> bool:
        """Whether the text's code passes the tests, in a process with limits.

        Raises InputError where no code can run.
        """
        check_works()
        return runs(self.program(text))

    def program(self, text: str) -> str:
        """The code to run: what stands before the function in the prompt, the completion, the tests.

        A chat model writes the whole function. What a model writes without a signature is taken for
        the function's body, which continues the prompt.
        """
        # 1. The completion's code: the first block that defines the function, else the first block.
        signature = re.compile(rf"^(?:async )?def {re.escape(self.entry_point)}\b", re.MULTILINE)
        blocks = BLOCK.findall(text) or [text]
        code = next((block for block in blocks if signature.search(block)), blocks[0])

        # 2. Before it: imports and helpers, or for a body the whole prompt.
        before = self.prompt
        if signature.search(code):
            before = signature.split(self.prompt)[0]
        elif not code.startswith((" ", "\t", "\n", "\r")):
            code = textwrap.indent(code, "    ")
        return f"{before}\n{code}\n{self.test}\ncheck({self.entry_point})\n"


Check = NumberCheck | PythonCheck  # runs_code: whether `right` executes what the target wrote
CHECKS: Mapping[str, type[Check]] = {"number": NumberCheck, "python": PythonCheck}


def check_of(fields: object) -> Check:
    """The check that a JSON object describes: its `kind`, and texts that the kind needs.

    Raises ValueError for anything else.
    """
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise ValueError("`check` is not a JSON object of texts")
    texts = dict(fields)
    kind = texts.pop("kind", "")
    if kind not in CHECKS:
        raise ValueError(f"`check` is of kind {kind!r}, known: {', '.join(CHECKS)}")
    try:
        return CHECKS[kind](**texts)
    except TypeError as error:
        raise ValueError(f"`check` of kind {kind}: {error}") from error
