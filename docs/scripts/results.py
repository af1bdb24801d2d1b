"""Figures that pages show: a small JSON file for each claim, docs/results/NAME.json.

A run leaves its report in its --out; the figures of it that a page shows are copied into such a file, one claim and
one table each. `make pages` makes the tables of the pages from these files, so no figure on a page is typed twice.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "results"
Cell = str | int | float | list[float] | None


@dataclass(frozen=True)
class Result:
    """One claim, its table, and how to make the table again.

    Args:
        claim: the sentence that the table shows.
        command: lines for a shell. Words in capitals stand for paths and names of the reader's own.
        machine: processor, and dtype; programs beside treespec with their versions.
        date: of the run, YYYY-MM-DD.
        target, head: the models; "none" where the command takes none.
        intervals: what the numbers in brackets are, or how uncertain the figures are; "" where nothing is known.
        show_intervals: whether the table shows the brackets.
        columns: headings. A heading `T = 1: τ` holds for the columns after it up to the next colon.
        digits: decimals of each column's numbers.
        rows: cells: a text, a number, [number, low, high], or null where nothing was measured.
    """

    claim: str
    command: list[str]
    machine: str
    date: str
    target: str
    head: str
    intervals: str
    show_intervals: bool
    columns: list[str]
    digits: list[int]
    rows: list[list[Cell]]

    @classmethod
    def load(cls, name: str) -> "Result":
        """Read docs/results/NAME.json."""
        return cls(**json.loads((FOLDER / f"{name}.json").read_text("utf-8")))

    def format_cell(self, cell: Cell, digits: int) -> str:
        """A cell as the table shows it."""
        if cell is None:
            return "–"
        if isinstance(cell, float):
            return f"{cell:.{digits}f}"
        if isinstance(cell, list):
            value, low, high = (f"{number:.{digits}f}" for number in cell)
            return f"{value} ({low}–{high})" if self.show_intervals else value
        return f"{cell:,}" if isinstance(cell, int) else cell

    def format_table(self, columns: list[int] | None = None) -> str:
        """The Markdown table, or some of its columns."""
        chosen = columns or range(len(self.columns))
        lines = [[self.columns[i] for i in chosen], ["---" for _ in chosen]]
        for row in self.rows:
            lines.append([self.format_cell(row[i], self.digits[i]) for i in chosen])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def format_section(self) -> str:
        """Claim, table, command, and a line about machine and date, and about models other than `demo`."""
        command = "\n".join(self.command)
        facts = [f"{self.machine}, {self.date}"]
        facts += [f"target: {self.target}"] if "`demo`" not in self.target else []
        facts += [f"head: {self.head}"] if self.head not in ("`demo`", "none") else []
        facts += [self.intervals] if self.intervals else []
        about = "; ".join(facts)
        return f"**{self.claim}**\n\n{self.format_table()}\n```sh\n{command}\n```\n\n{about[:1].upper()}{about[1:]}.\n"
