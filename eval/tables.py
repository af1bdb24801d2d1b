"""An evaluation as people read it: OUT/report.md and .html, the terminal, and OUT/answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from treespec.eval.config import EvalConfig
from treespec.eval.figures import Row, Summary, summarise
from treespec.eval.intervals import FEW
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.report import Cell, Report, Table, markdown, notes, page, percent, shown
from treespec.eval.verdict import noise_of, verdict
from treespec.files.atomic import write_json, write_text
from treespec.options import command_line

LABELS = ("Drafter", "Method", "Tree", "T", "Batch")  # of a contestant

Cells = dict[str, Cell]  # of a row, by column


def write_report(ledger: Ledger, out: Path) -> Summary:
    """Write OUT/report.json, .md and .html, and OUT/answers/<contestant>.jsonl; return the figures."""
    # 1. The figures, the report, and the page with what the figures depend on.
    said = json.dumps(summarise(ledger))
    summary = json.loads(said, parse_constant=lambda _: None)  # no times where none were measured
    report = report_of(summary)
    config = EvalConfig(**summary["options"])
    setup = {"command": command_line("eval", EvalConfig, summary["options"])}
    setup |= {what: str(value) for what, value in summary["environment"].items()}
    title = f"{PurePath(config.target).name}: acceptance and speed"
    subtitle = f"{config.source}, {summary['questions']} of the questions {config.questions}"
    write_json(out / "report.json", summary)
    write_text(out / "report.md", markdown(report))
    write_text(out / "report.html", page(report, title, subtitle, [*setup.items()]))

    # 2. The completions.
    lines: dict[str, list[str]] = {}
    for completion in ledger.of("completion"):
        lines.setdefault(completion["contestant"], []).append(json.dumps(answer_of(completion)))
    for name, own in lines.items():
        write_text(out / "answers" / f"{name}.jsonl", "\n".join([*own, ""]))
    return summary


def answer_of(completion: Completion) -> dict[str, object]:
    """A line for the readers of FastChat (llm_judge) and Spec-Bench (evaluation/eval.py).

    The fields that Spec-Bench adds have one item a turn; accept_lengths is one list for all turns.
    """
    names = {name: name for name in ("turns", "new_tokens", "accept_lengths")}
    names |= {"decoding_steps": "cycles", "wall_time": "wall"}
    question = completion["question_id"]
    model = completion["contestant"]
    return {
        "question_id": question,
        "category": completion["category"],
        "answer_id": f"{model}-{question}",
        "model_id": model,
        "choices": [{"index": 0} | {name: completion[own] for name, own in names.items()}],
        "tstamp": completion["time"],
    }


def report_of(summary: Summary) -> Report:
    """Tables, notes and verdict."""
    rows = summary["rows"]
    noises = [(a, noise_of(a["speedup"])) for a in summary["again"]]
    own = [row for row in rows if not row["peer"]]
    on_gpu = "cuda" in summary["environment"]["device"]  # the host does not wait for each stage
    timed = own if summary["timed"] and not on_gpu else []
    pairs = [row for row in timed if row["drafter"] and row["overall"]["bound"]]
    speed = table("Acceptance length τ (tokens per target forward) and speed", rows, speeds)
    again = [named(a) | {"speedup": a["speedup"]} for a in summary["again"]]
    failed = [{"Method": name, "tokens/s": "failed"} for name in summary["failed"]]
    tables = [
        replace(speed, rows=[*speed.rows, *again, *failed]),
        table("By category: τ (speedup)", own, by_category),
        table("Right answers", [row for row in rows if row["right"]], right),
        table("Acceptance rate α by depth", own, rates),
        table("A cycle's time in ms (share)", timed, cycle),
        table("Speedup without prompts, and its bound", pairs, bound),
    ]
    config = EvalConfig(**summary["options"])
    more = {"summary": summary, "config": config, "few": FEW, "noises": noises}
    return Report(tables, notes("notes.txt", **more), verdict(summary))


def table(title: str, rows: Sequence[Row], cells: Callable[[Row], Cells]) -> Table:
    """A row for each contestant, labelled by what tells it from the others."""
    return Table(title, LABELS, [cells(row) | named(row) for row in rows], reference=1.0)


def named(row: Row) -> Cells:
    return dict(zip(LABELS, row["labels"], strict=True))


def speeds(row: Row) -> Cells:
    overall = row["overall"]
    alone = row["peer"] or row["batch"] == 1  # a batch shares its seconds out
    first = f"{overall['first_token']:.3f}" if alone and overall["first_token"] else ""
    return {
        "τ": overall["acceptance_length"],
        "tokens/s": shown(overall["tokens_per_second"]),
        "speedup": overall["speedup"],
        "by generate": row["by_generate"],
        "first token, s": first,
        "identical": "" if row["same"] is None else f"{row['same']} of {row['turns']}",
    }


def by_category(row: Row) -> Cells:
    """A cell for each category, then one for all questions."""
    cells: Cells = {}
    for name, figures in {**row["categories"], "overall": row["overall"]}.items():
        tau, speedup = (
            shown(figures[which]).partition(" ")[0] for which in ("acceptance_length", "speedup")
        )
        cells[name] = f"{tau} ({speedup})" if speedup else tau
    return cells


def right(row: Row) -> Cells:
    right = row["right"]
    of = f"of {row['right']['answers']}"
    return {
        "right": f"{right['right']} {of}",
        "%": shown(percent(right["share"])),
        "same verdict": "" if right["same"] is None else f"{right['same']} {of}",
    }


def rates(row: Row) -> Cells:
    overall = row["overall"]
    by_depth = enumerate(overall["acceptance_rate_by_depth"], 1)
    undrafted = f"{overall['undrafted']:.0%}" if row["drafter"] else ""
    nodes = {"nodes": f"{overall['nodes']:.0f}", "no draft": undrafted}
    return nodes | {str(depth): rate for depth, rate in by_depth}


def cycle(row: Row) -> Cells:
    ms = row["overall"]["cycle_ms"]
    whole = sum(ms.values())
    return {
        "cycle": f"{whole:.2f}",
        **{stage: f"{own:.2f} ({own / whole:.0%})" for stage, own in ms.items()},
        "overhead": f"{1 - (ms['target'] + ms['draft model']) / whole:.0%}",
        "prefill": f"{row['overall']['prefill_seconds']:.2f} s",
    }


def bound(row: Row) -> Cells:
    overall = row["overall"]
    speedup = overall["decoding_speedup"]
    most = overall["bound"]
    share = f"{speedup['value'] / most['value']:.0%}"
    tau = overall["acceptance_length"]
    return {"τ": tau, "speedup": speedup, "bound": most, "speedup/bound": share}
