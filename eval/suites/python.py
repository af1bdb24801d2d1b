"""Unit tests on the code of an answer: pass@1 of one sample (Chen et al. 2021, 2107.03374)."""

import re
import textwrap
from dataclasses import dataclass
from typing import final

from treespec.eval.suites.sandbox import check_works, runs

BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)  # of Markdown, closed or cut off


@final
@dataclass(frozen=True)
class PythonCheck:
    """prompt: what the function begins with, up to its docstring. test: code that defines `check`.

    entry_point: the function's name, which `check` is called with.
    """

    prompt: str
    test: str
    entry_point: str
    runs_code = True

    def right(self, answer: str) -> bool:
        """Whether the answer's code passes the tests, in a process with limits.

        Raises InputError where no code can run.
        """
        check_works()
        return runs(self.program(answer))

    def program(self, answer: str) -> str:
        """The code to run: what stands before the function in the prompt, the answer, the tests.

        A chat model writes the whole function. What a model writes without a signature is taken for
        the function's body, which continues the prompt.
        """
        # 1. The answer's code: the first block that defines the function, else the first block.
        signature = re.compile(rf"^(?:async )?def {re.escape(self.entry_point)}\b", re.MULTILINE)
        blocks = BLOCK.findall(answer) or [answer]
        code = next((block for block in blocks if signature.search(block)), blocks[0])

        # 2. Before it: imports and helpers, or for a body the whole prompt.
        if signature.search(code):
            start = signature.search(self.prompt)
            before = self.prompt[: start.start()] if start else self.prompt
        else:
            before = self.prompt
            if not code.startswith((" ", "\t", "\n", "\r")):
                code = textwrap.indent(code, "    ")
        return f"{before}\n{code}\n{self.test}\ncheck({self.entry_point})\n"
