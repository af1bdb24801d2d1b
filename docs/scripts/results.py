"""The figures on the pages: a small JSON file for each claim, docs/results/NAME.json.

A run writes its report into its --out. This script copies a table of the report into the file of a claim, with today's
date:

    python docs/scripts/results.py drafters runs/drafters/report.md "Acceptance length" --columns 0,2,3,4

`make pages` makes the pages' tables from these files, so that no figure on a page is typed by hand.
"""

import datetime
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path(__file__).resolve().parents[1] / "results"
NUMBER = r"-?[\d,]*\.?\d+"
WITH_INTERVAL = re.compile(rf"({NUMBER}) \(({NUMBER})–({NUMBER})\)")
Cell = str | int | float | list[float] | None


@dataclass(frozen=True)
class Result:
    """One claim, its table, and the command that makes the table again.

    Attributes:
        claim: the sentence that the table supports.
        command: lines for a shell. Words in capitals are the reader's paths and names.
        machine: processor and dtype; other programs with their versions.
        date: date of the run, YYYY-MM-DD.
        target: the target; "none" if the command takes none.
        head: the draft head; "none" if the command takes none.
        intervals: meaning of the numbers in brackets, or how uncertain the figures are; "" if that is not known.
        show_intervals: whether the table has the brackets.
        columns: headings. The part of `T = 1: τ` before the colon also applies to the columns after it, up to the
            next heading with a colon.
        digits: decimals of each column's numbers.
        rows: cells: a text, a number, [number, low, high], or null if nothing was measured.
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
        """Format a cell for the table."""
        if cell is None:
            return "–"
        if isinstance(cell, float):
            return f"{cell:.{digits}f}"
        if isinstance(cell, list):
            value, low, high = (f"{number:.{digits}f}" for number in cell)
            return f"{value} ({low}–{high})" if self.show_intervals else value
        return f"{cell:,}" if isinstance(cell, int) else cell

    def format_table(self, columns: list[int] | None = None) -> str:
        """Format the Markdown table. columns: indices of the columns to keep; default: all."""
        column_indices = columns or range(len(self.columns))
        lines = [[self.columns[i] for i in column_indices], ["---" for _ in column_indices]]
        for row in self.rows:
            lines.append([self.format_cell(row[i], self.digits[i]) for i in column_indices])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def format_section(self) -> str:
        """Format claim, table, command, and a line about machine, date and all models other than `demo`."""
        command = "\n".join(self.command)
        facts = [f"{self.machine}, {self.date}"]
        facts += [f"target: {self.target}"] if "`demo`" not in self.target else []
        facts += [f"head: {self.head}"] if self.head not in ("`demo`", "none") else []
        facts += [self.intervals] if self.intervals else []
        about = "; ".join(facts)
        return f"**{self.claim}**\n\n{self.format_table()}\n```sh\n{command}\n```\n\n{about[:1].upper()}{about[1:]}.\n"

    def save(self, name: str) -> None:
        """Write docs/results/NAME.json, with a line for each row."""
        fields = []
        for key, value in asdict(self).items():
            if key in ("command", "rows"):
                items = ",\n".join(f"    {dump(item)}" for item in value)
                fields.append(f'  "{key}": [\n{items}\n  ]')
            else:
                fields.append(f'  "{key}": {dump(value)}')
        text = ",\n".join(fields)
        (FOLDER / f"{name}.json").write_text(f"{{\n{text}\n}}\n", "utf-8")


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def parse_number(text: str) -> int | float:
    digits = text.replace(",", "")
    return float(digits) if "." in digits else int(digits)


def parse_cell(text: str) -> Cell:
    """Parse a cell of a report: a number, a number with its interval, nothing, or a text."""
    if text in ("", "–"):
        return None
    if interval := WITH_INTERVAL.fullmatch(text):
        return [parse_number(number) for number in interval.groups()]
    return parse_number(text) if re.fullmatch(NUMBER, text) else text


def count_decimals(texts: list[str]) -> int:
    """Count the decimals of a column's numbers; the largest count wins."""
    numbers = [re.match(rf"{NUMBER}(?= \(|$)", text) for text in texts]
    return max((len(number[0].partition(".")[2]) for number in numbers if number), default=0)


def read_table(report: str, title: str) -> list[list[str]]:
    """Read the table below the heading that begins with `title`; its first row has the columns' headings."""
    sections = re.split(r"^#+ ", report, flags=re.MULTILINE)
    section = next(part for part in sections if part.startswith(title))
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [rows[0], *rows[2:]]


def main(
    name: Annotated[str, typer.Argument(help="of docs/results/NAME.json")],
    report: Annotated[Path, typer.Argument(help="report.md, tau.md or acceptance.md of a run")],
    title: Annotated[str, typer.Argument(help="how the table's heading begins")],
    columns: Annotated[str, typer.Option(help="numbers of the columns to take, from 0")],
) -> None:
    """Replace a claim's figures. The headings stay if their number does not change."""
    table = read_table(report.read_text("utf-8"), title)
    column_indices = [int(column) for column in columns.split(",")]
    headings, *rows = [[row[i] for i in column_indices] for row in table]
    result = Result.load(name)
    if len(result.columns) == len(headings):
        headings = result.columns
    replace(
        result,
        date=datetime.date.today().isoformat(),
        columns=headings,
        digits=[count_decimals(list(column)) for column in zip(*rows, strict=True)],
        rows=[[parse_cell(cell) for cell in row] for row in rows],
    ).save(name)


if __name__ == "__main__":
    typer.run(main)
