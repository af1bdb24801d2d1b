"""The files that an evaluation leaves next to its ledger: figures, report, page, completions."""

import json
from pathlib import Path, PurePath

from treespec.eval.common import drafted_by
from treespec.eval.config import EvalConfig
from treespec.eval.figures import Summary, summarise
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.report import markdown, page
from treespec.eval.tables import report_of
from treespec.files.atomic import write_json, write_text
from treespec.options import command_line


def write_report(ledger: Ledger, out: Path) -> Summary:
    """Write OUT/report.json, .md and .html, and OUT/answers/<contestant>.jsonl; return the figures."""
    said = json.dumps(summarise(ledger))
    summary = json.loads(said, parse_constant=lambda _: None)  # no times where none were measured
    write_json(out / "report.json", summary)
    write_text(out / "report.md", markdown(report_of(summary)))
    write_text(out / "report.html", page_of(summary))
    lines: dict[str, list[str]] = {}
    for completion in ledger.of("completion"):
        lines.setdefault(completion["contestant"], []).append(json.dumps(answer_of(completion)))
    for name, own in lines.items():
        write_text(out / "answers" / f"{name}.jsonl", "\n".join([*own, ""]))
    return summary


def page_of(summary: Summary) -> str:
    """The report, with what the figures depend on."""
    options, count = summary["options"], summary["questions"]
    setup = {"command": command_line("eval", EvalConfig, options)}
    setup |= {what: str(value) for what, value in summary["environment"].items()}
    return page(
        report_of(summary),
        f"{PurePath(options['target']).name}: acceptance and speed",
        subtitle=f"{drafted_by(options)}, {count} {'question' if count == 1 else 'questions'} of "
        f"{options['questions']}",
        setup=list(setup.items()),
    )


def answer_of(completion: Completion) -> dict[str, object]:
    """A line for the readers of FastChat (llm_judge) and Spec-Bench (evaluation/eval.py).

    The fields that Spec-Bench adds have one item a turn; accept_lengths is one list for all turns.
    """
    return {
        "question_id": completion["question_id"],
        "category": completion["category"],
        "answer_id": f"{completion['contestant']}-{completion['question_id']}",
        "model_id": completion["contestant"],
        "choices": [
            {
                "index": 0,
                "turns": completion["turns"],
                "decoding_steps": completion["cycles"],
                "new_tokens": completion["new_tokens"],
                "wall_time": completion["wall"],
                "accept_lengths": completion["accept_lengths"],
            }
        ],
        "tstamp": completion["time"],
    }
