"""Write an evaluation's tables and answers: OUT/report.md, .html and .csv, and OUT/answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from treespec.eval.config import EvalConfig, is_oracle
from treespec.eval.exports import format_summary_csv
from treespec.eval.figures import Row, Summary, summarize_ledger
from treespec.eval.header import build_header
from treespec.eval.intervals import MIN_QUESTIONS
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.page import write_page
from treespec.eval.report import (
    Cell,
    EvalPage,
    EvalReport,
    Table,
    escape_cell,
    list_notes,
    to_percent,
)
from treespec.eval.verdict import estimate_noise, write_verdict
from treespec.files.atomic import write_json, write_text

LABEL_COLUMNS = ("Drafter", "Method", "Tree", "T", "Batch")  # the columns that name a system

Cells = dict[str, Cell]  # a row's cells by column


def write_report(ledger: Ledger, out: Path) -> Summary:
    """Write OUT/report.json, .csv and .html, and OUT/answers/<system>.jsonl; return the figures."""
    # 1. The figures, and the page.
    text = json.dumps(summarize_ledger(ledger))
    summary = json.loads(text, parse_constant=lambda _: None)  # NaN: no time was measured
    write_json(out / "report.json", summary)
    write_text(out / "report.csv", format_summary_csv(summary))
    write_page(build_eval_page(summary), out / "report.html")

    # 2. The completions.
    lines: dict[str, list[str]] = {}
    for completion in ledger.list_entries("completion"):
        lines.setdefault(completion["contestant"], []).append(
            json.dumps(build_answer_line(completion))
        )
    for name, answers in lines.items():
        write_text(out / "answers" / f"{name}.jsonl", "\n".join(answers) + "\n")
    return summary


def build_answer_line(completion: Completion) -> dict[str, object]:
    """Build a line of OUT/answers, in the format of FastChat (llm_judge), Spec-Bench and EAGLE (their evaluation).

    The fields that these add have one item a turn, except accept_lengths, which is one list for all turns. EAGLE's
    `idxs` are the numbers of the turns' last cycles, counted from 0.
    """
    choice = {
        "index": 0,
        "turns": completion["turns"],
        "idxs": [max(cycles - 1, 0) for cycles in completion["cycles"]],
        "new_tokens": completion["new_tokens"],
        "accept_lengths": completion["accept_lengths"],
        "decoding_steps": completion["cycles"],
        "wall_time": completion["wall"],
    }
    question = completion["question_id"]
    model = completion["contestant"]
    return {
        "question_id": question,
        "category": completion["category"],
        "answer_id": f"{model}-{question}",
        "model_id": model,
        "choices": [choice],
        "tstamp": completion["time"],
    }


def build_eval_page(summary: Summary) -> EvalPage:
    """Make the page of an evaluation."""
    options = summary["options"]
    header = build_header(
        "eval",
        EvalConfig,
        options,
        summary["environment"],
        summary["questions"],
        summary["date"],
    )
    title = f"{PurePath(options['target']).name}: acceptance and speed"
    return EvalPage(title, header, build_eval_report(summary))


def build_eval_report(summary: Summary) -> EvalReport:
    """Make the report of an evaluation: tables, notes and a verdict."""
    # 1. The rows of each table.
    rows = summary["rows"]
    own_rows = [row for row in rows if not row["peer"]]
    timed_rows = []
    if summary["timed"] and "cuda" not in summary["environment"]["device"]:
        timed_rows = own_rows  # on a GPU stages run asynchronously, so their times are not known
    bounded_rows = [row for row in timed_rows if row["drafter"] and row["overall"]["bound"]]

    # 2. The speeds, with the baseline's repeat and the peers that failed.
    speed = build_speed_table(
        "Acceptance length τ (tokens per target forward) and speed", rows, build_speed_cells
    )
    speed_rows = list(speed.rows)
    noise_by_repeat = []
    for row in summary["again"]:
        speed_rows.append(label_row(row) | {"speedup": row["speedup"]})
        noise_by_repeat.append((row, estimate_noise(row["speedup"])))
    for name in summary["failed"]:
        speed_rows.append({"Method": name, "tokens/s": "failed"})

    # 3. The report.
    tables = [
        replace(speed, rows=speed_rows),
        build_table("By category: τ (speedup)", rows, build_category_cells),
        build_table("Right answers", [row for row in rows if row["right"]], build_accuracy_cells),
        build_table("Acceptance rate α by depth", own_rows, build_rate_cells),
        build_table("A cycle's time in ms (share)", timed_rows, build_cycle_cells),
        build_speed_table(
            "Speedup without prompts, and its bound", bounded_rows, build_bound_cells
        ),
    ]
    config = EvalConfig(**summary["options"])
    notes = list_notes(
        "notes.txt",
        summary=summary,
        config=config,
        few=MIN_QUESTIONS,
        noises=noise_by_repeat,
        has_oracle=has_oracle(rows),
    )
    return EvalReport(tables, notes, write_verdict(summary))


def has_oracle(rows: Sequence[Row]) -> bool:
    """Whether an oracle is among the systems."""
    return any(is_oracle(row["drafter"]) for row in rows)


def build_table(title: str, rows: Sequence[Row], cells: Callable[[Row], Cells]) -> Table:
    """Make a table with a row for each system, labelled by the options that differ between systems."""
    return Table(title, LABEL_COLUMNS, [cells(row) | label_row(row) for row in rows])


def build_speed_table(title: str, rows: Sequence[Row], cells: Callable[[Row], Cells]) -> Table:
    """Make a table as `build_table` does whose figures are 1 for plain decoding."""
    table = build_table(title, rows, cells)
    return replace(table, reference=1.0, reference_name="one token at a time")


def label_row(row: Row) -> Cells:
    """Make the cells that name a row's system."""
    return dict(zip(LABEL_COLUMNS, row["labels"], strict=True))


def build_speed_cells(row: Row) -> Cells:
    """Make the cells of τ, tokens a second, and seconds to the first token."""
    overall = row["overall"]
    is_timed_alone = row["peer"] or row["batch"] == 1  # a batch's completions share its seconds
    first_token = ""
    if is_timed_alone and overall["first_token"]:
        first_token = f"{overall['first_token']:.3f}"
    identical = ""
    if row["same"] is not None:
        identical = f"{row['same']} of {row['turns']}"
    return {
        "τ": overall["acceptance_length"],
        "tokens/s": escape_cell(overall["tokens_per_second"]),
        "speedup": overall["speedup"],
        "speedup of mean rates": overall["mean_rate_speedup"],
        "by generate": row["by_generate"],
        "first token, s": first_token,
        "identical": identical,
    }


def build_category_cells(row: Row) -> Cells:
    """Make a cell for each category, then one for all questions."""
    cells: Cells = {}
    for name, figures in {**row["categories"], "overall": row["overall"]}.items():
        tau, _, _ = escape_cell(figures["acceptance_length"]).partition(" ")  # without its interval
        speedup, _, _ = escape_cell(figures["speedup"]).partition(" ")
        cells[name] = tau
        if speedup:
            cells[name] = f"{tau} ({speedup})".strip()
    return cells


def build_accuracy_cells(row: Row) -> Cells:
    """Make the cells of right answers, for questions that have one."""
    right = row["right"]
    answers = right["answers"]
    same_verdicts = ""
    if right["same"] is not None:
        same_verdicts = f"{right['same']} of {answers}"
    return {
        "right": f"{right['right']} of {answers}",
        "%": escape_cell(to_percent(right["share"])),
        "same verdict": same_verdicts,
    }


def build_rate_cells(row: Row) -> Cells:
    """Make the cells of a tree's nodes and of α by depth."""
    overall = row["overall"]
    cells: Cells = {"nodes": f"{overall['nodes']:.0f}", "no draft": ""}
    if row["drafter"]:
        cells["no draft"] = f"{overall['undrafted']:.0%}"
    for depth, rate in enumerate(overall["acceptance_rate_by_depth"], 1):
        cells[str(depth)] = rate
    return cells


def build_cycle_cells(row: Row) -> Cells:
    """Make the cells of a cycle's milliseconds by stage, and of the prefill's seconds."""
    stage_ms = row["overall"]["cycle_ms"]
    cycle_ms = sum(stage_ms.values())
    cells: Cells = {"cycle": f"{cycle_ms:.2f}"}
    for stage, ms in stage_ms.items():
        cells[stage] = f"{ms:.2f} ({ms / cycle_ms:.0%})"
    cells["overhead"] = f"{1 - (stage_ms['target'] + stage_ms['draft model']) / cycle_ms:.0%}"
    cells["prefill"] = f"{row['overall']['prefill_seconds']:.2f} s"
    return cells


def build_bound_cells(row: Row) -> Cells:
    """Make the cells of the speedup without prefill, and of its bound, where a cycle costs only its forwards."""
    overall = row["overall"]
    speedup = overall["decoding_speedup"]
    bound = overall["bound"]
    share = f"{speedup['value'] / bound['value']:.0%}"
    tau = overall["acceptance_length"]
    return {"τ": tau, "speedup": speedup, "bound": bound, "speedup/bound": share}
