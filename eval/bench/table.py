"""A benchmark's figures as tables (notes and verdict: notes.py)."""

from collections.abc import Callable

from treespec.eval.bench.config import NODES
from treespec.eval.bench.forwards import FRONTIERS, WAITING
from treespec.eval.bench.notes import notes_of, verdict_of
from treespec.eval.bench.result import (
    RATIOS,
    BatchFigures,
    BenchResult,
    CycleFigures,
    ForwardTime,
    RowFigures,
    Work,
)
from treespec.eval.common import STAGE_NAMES, STAGES
from treespec.eval.report import Report, Table
from treespec.eval.verdict import interval

NAMES = ["", "T"]  # of the columns that label a row: the method and its temperature
RATIO_NAMES = ["speedup", "bound", "speedup/bound"]


def report_of(result: BenchResult) -> Report:
    """What OUT/bench.md and the terminal show."""
    # 1. Forwards; a drafter without a draft model has no step.
    timed, rows = result["forwards"], result["rows"]
    target = forward_table(timed, "The target's forward in ms, by nodes", "target")
    step = forward_table(timed, "The head's step in ms", "extend")
    tables = [table for table in (target, step) if table]

    # 2. Cycles of treespec's own rows.
    columns = ["cycle", *STAGE_NAMES.values(), "overhead"]
    tables.append(Table("A cycle in ms", NAMES, columns, cycle_rows(rows, times_of), brief=True))
    title = "Speedup and its bound; τ: tokens per target forward"
    columns = ["τ", "tokens/s", *RATIO_NAMES, "overall: speedup", *RATIO_NAMES[1:]]
    tables.append(Table(title, NAMES, columns, cycle_rows(rows, speedups_of)))

    # 3. Speed of all rows, and of batches.
    title = "Beside transformers, prefill included"
    over = ["by model.generate", "by one token"]
    columns = ["tokens", "tokens/s", *over, "overall: tokens/s", *over, "identical"]
    tables.append(Table(title, NAMES, columns, speed_rows(rows)))
    columns = ["texts", "tokens", "tokens/s", "by one token", "by the smallest batch"]
    if result["batches"]:
        tables.append(Table("Batches", NAMES, columns, list(map(batch_row, result["batches"]))))
    return Report(tables, notes_of(result), verdict_of(result))


def forward_table(forwards: list[ForwardTime], title: str, what: Work) -> Table | None:
    """One row per context; None if nothing of the kind was timed.

    what: "target" for the target's forwards by nodes, "extend" for the head's two forwards.
    """
    if what == "target":
        name = "target"
        columns: dict[tuple[Work, int], str] = {("target", nodes): str(nodes) for nodes in NODES}
    else:
        name = "head"
        columns = {("begin", WAITING): f"begin, {WAITING} tokens"}
        columns |= {("extend", nodes): f"level of {nodes}" for nodes in FRONTIERS}
    rows = []
    timed = [f for f in forwards if (f["what"], f["nodes"]) in columns]
    ms = {(f["context"], f["what"], f["nodes"]): f["ms"] for f in timed}
    for context in dict.fromkeys(f["context"] for f in timed):
        cells = [interval(ms[context, *column]) for column in columns]
        rows.append([name, str(context), *cells])
    return Table(title, ["", "context"], list(columns.values()), rows) if rows else None


def cycle_rows(
    rows: list[RowFigures], cells: Callable[[CycleFigures], list[str]]
) -> list[list[str]]:
    """A line for each row that has figures of a cycle."""
    return [[*labels_of(row), *cells(row["cycle"])] for row in rows if row["cycle"]]


def times_of(cycle: CycleFigures) -> list[str]:
    """Milliseconds of the cycle and its stages, and the overhead in percent."""
    stages = [interval(cycle[stage]) for stage in STAGES]
    return [interval(cycle["cycle"]), *stages, f"{cycle['overhead']['value']:.0%}"]


def speedups_of(cycle: CycleFigures) -> list[str]:
    medians = [interval(cycle[ratio]) for ratio in RATIOS]
    overall = [interval(cycle["overall"][ratio]) for ratio in RATIOS]
    tau, speed = interval(cycle["acceptance_length"]), interval(cycle["tokens_per_second"], 1)
    return [tau, speed, *medians, *overall]


def speed_rows(rows: list[RowFigures]) -> list[list[str]]:
    """A line for each row that answered or raised."""
    lines = []
    for row in rows:
        speed, answers = row["speed"], row["answers"]
        if row["failed"]:
            lines.append([*labels_of(row), "failed", *[""] * 7])
        elif speed:
            cells = [str(sum(answer["tokens"] for answer in answers))]
            for part in (speed, speed["overall"]):
                cells.append(interval(part["tokens_per_second"], 1))
                cells += [interval(part["over_generate"]), interval(part["over_one_token"])]
            same = row["same_as_one_token"]
            cells.append("" if same is None else f"{same} of {len(answers)}")
            lines.append([*labels_of(row), *cells])
    return lines


def batch_row(batch: BatchFigures) -> list[str]:
    counts = [str(batch["batch"]), str(batch["tokens"])]
    speed = interval(batch["tokens_per_second"], 1)
    ratios = [interval(batch["over_one_token"]), interval(batch["over_smallest"])]
    return [*labels_of(batch), *counts, speed, *ratios]


def labels_of(row: RowFigures | BatchFigures) -> list[str]:
    """The cells below `NAMES`."""
    return [row["name"], f"{row['temperature']:g}"]
