"""An evaluation as people read it: tables, notes and a verdict."""

from collections.abc import Callable, Sequence

from treespec.eval.common import STAGE_NAMES, STAGES, drafted_by
from treespec.eval.mtbench.config import EvalConfig
from treespec.eval.mtbench.result import Figures, Row, Summary
from treespec.eval.mtbench.right import percent, right_sentences
from treespec.eval.report import Report, Table
from treespec.eval.verdict import (
    FEW,
    MeasuredPair,
    interval,
    noise_of,
    sentences,
    short,
    tree_name,
)

SPEEDS = ["τ", "tokens/s", "speedup", "by question", "identical"]
RIGHT = ["right", "%", "% less the baseline's", "same verdict"]


def report_of(summary: Summary) -> Report:
    """What OUT/summary.md and the terminal show."""
    # 1. Speed, of all questions and by category.
    rows = summary["configurations"]
    categories = list(rows[0]["categories"])
    columns = [*categories, "overall"]
    speed = _table("Acceptance length τ (tokens per target forward) and speed", SPEEDS, rows, _main)
    again = summary["again"]
    noises = {second["temperature"]: noise_of(second["speedup"]) for second in again}
    for second in again:
        cells = ["", "", interval(second["speedup"]), "", ""]
        speed.rows.append(["", "baseline again", "", f"{second['temperature']:g}", *cells])
    tables = [
        speed,
        _table("By category: τ (speedup)", columns, rows, _lengths),
    ]
    if len(categories) > 1:
        tables.append(_table("By category: tokens/s", columns, rows, _speeds, brief=True))

    # 2. Right answers, where there are any to know.
    if any(row["right"] for row in rows):
        tables.append(_table("Right answers", RIGHT, rows, _right))

    # 3. What a cycle accepts and where its time goes.
    depths = range(max(len(row["overall"]["acceptance_rate_by_depth"]) for row in rows))
    if depths:
        by_depth = ["nodes", *(str(depth + 1) for depth in depths)]
        title = "Acceptance rate α by depth"
        tables.append(_table(title, by_depth, rows, lambda row: _rates(row, depths), brief=True))
    cycle = ["cycle", *STAGE_NAMES.values(), "overhead", "prefill"]
    tables.append(_table("A cycle's time in ms (share)", cycle, rows, _cycle, brief=True))
    lines = sentences(_measured(rows), summary["questions"], noises)
    return Report(tables, notes(summary), [*lines, *right_sentences(rows)])


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    cells: Callable[[Row], list[str]],
    brief: bool = False,
) -> Table:
    """A row for each configuration, labelled by what tells it from the others."""
    several = _several(rows)
    labels = [
        [
            short(row["drafter"]) if several else "",
            row["verifier"] + ("" if row["lossless"] else " (lossy)"),
            tree_name(row["tree"]),
            f"{row['temperature']:g}",
        ]
        for row in rows
    ]
    whole = [[*label, *cells(row)] for label, row in zip(labels, rows, strict=True)]
    return Table(title, ["Drafter", "Verifier", "Tree", "T"], columns, whole, brief)


def _measured(rows: Sequence[Row]) -> list[MeasuredPair]:
    """All rows but the baseline's for the verdict, named as `--verifier` names them.

    With several drafters, the drafter stands before the name.
    """
    several, pairs = _several(rows), []
    for row in rows:
        # 1. Its speed, if it has one.
        overall = row["overall"]
        speed, tau = overall["tokens_per_second"]["value"], overall["acceptance_length"]["value"]
        if row["verifier"] == "baseline" or speed is None or tau is None:
            continue

        # 2. Its name and figures.
        name = row["verifier"] + (f"@{tree_name(row['tree'])}" if row["tree"] else "")
        pair = MeasuredPair(
            f"{short(row['drafter'])} with {name}" if several else name,
            row["temperature"],
            speed,
            overall["speedup"],
            tau,
            row["lossless"],
            row["of_fastest"],
            overall["undrafted"] if row["verifier"] == "auto" else 0.0,
        )
        pairs.append(pair)
    return pairs


def _several(rows: Sequence[Row]) -> bool:
    """Whether there are several drafters."""
    return len({row["drafter"] for row in rows} - {None}) > 1


def notes(summary: Summary) -> list[str]:
    """What one must know to read the figures."""
    # 1. What was measured, and on what.
    config, rows = EvalConfig(**summary["config"]), summary["configurations"]
    lines = [
        f"Target {config.target}, {drafted_by(summary['config'])}, questions {config.questions} "
        f"({summary['questions']}), at most {config.max_new_tokens} new tokens a turn, "
        f"tree {config.tree or 'of each verifier by default'}, seed {config.seed}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers "
        "{transformers}, treespec {treespec}.".format(**summary["environment"]),
    ]

    # 2. What the columns mean.
    lines += [
        "Baseline: plain decoding, one token at a time through the same target. Speedup: tokens/s "
        "over the baseline's, totals over totals; by question: the mean of the questions' "
        "speedups. Ranges in brackets, which a narrow terminal leaves out in some tables: 95% "
        "bootstrap intervals over questions. Identical: answers (turns) with the baseline's very "
        "tokens. Nodes: of the tree in one forward.",
        "Overhead: share of a cycle outside the forwards of target and draft model. Prefill: all "
        "prompts through the target and the draft model.",
    ]
    for again in summary["again"]:
        if (noise := noise_of(again["speedup"])) is not None:
            lines.append(
                f"Baseline again: it answered {again['questions']} of the questions twice at "
                f"temperature {again['temperature']:g}. The interval of the second time's speed "
                f"over the first's reaches {100 * noise:.1f} % from 1: the clock's noise."
            )
    if config.batch > 1:
        lines.append(
            f"Rows are batched: {config.batch} questions were answered together, by the baseline "
            "too, their turns in step. Tokens/s are the tokens of all by the clock. A cycle's time "
            "is divided evenly among its texts, a cycle above is one text's share. Intervals take "
            "the questions for independent."
        )
    if any(row["right"] for row in rows):
        lines.append(
            "Right: the last number of the answer is the known one, or its code passes the tests "
            "(pass@1). Brackets: Wilson's 95% interval; for the difference, on the same questions, "
            "that of Agresti and Min. Same verdict: questions that both or neither answer rightly."
        )
    elif config.questions == "humaneval":
        lines.append("Which answers are right was not checked: --run-code runs their code.")

    # 3. What to be careful with.
    if few := summary["few_questions"]:
        lines.append(
            f"Fewer than {FEW} questions, so a rough guide with intervals too narrow: "
            f"{', '.join(few)}."
        )
    return lines + _cut(rows) + _left_out(summary["left_out"])


def _cut(rows: Sequence[Row]) -> list[str]:
    """How many answers were not ended by the model."""
    ends = [row["ended"] for row in rows]
    turns = sum(sum((end["model"], end["max_new_tokens"], end["context"])) for end in ends)
    cut = {
        "max_new_tokens": sum(end["max_new_tokens"] for end in ends),
        "the target's context": sum(end["context"] for end in ends),
    }
    return [
        f"{count} of {turns} answers were ended by {name}." for name, count in cut.items() if count
    ]


def _left_out(reasons: list[str]) -> list[str]:
    return [f"Left out, {len(reasons)}: {'; '.join(reasons[:3])}."] if reasons else []


def _main(row: Row) -> list[str]:
    overall, same = row["overall"], row["same_as_baseline"]
    return [
        interval(overall["acceptance_length"]),
        interval(overall["tokens_per_second"], digits=1),
        interval(overall["speedup"]),
        interval(overall["speedup_by_question"]),
        f"{same['same']} of {same['answers']}" if same else "",
    ]


def _groups(row: Row) -> list[Figures]:
    """The figures by category, then those of all questions."""
    return [*row["categories"].values(), row["overall"]]


def _lengths(row: Row) -> list[str]:
    return [
        f"{group['acceptance_length']['value']:.2f}"
        + (f" ({group['speedup']['value']:.2f})" if group["speedup"] else "")
        for group in _groups(row)
    ]


def _speeds(row: Row) -> list[str]:
    return [interval(group["tokens_per_second"], digits=1) for group in _groups(row)]


def _right(row: Row) -> list[str]:
    right = row["right"]
    if right is None:
        return [""] * len(RIGHT)
    return [
        f"{right['right']} of {right['answers']}",
        interval(percent(right["share"]), digits=1),
        interval(percent(right["difference"]), digits=1),
        "" if right["same"] is None else f"{right['same']} of {right['answers']}",
    ]


def _rates(row: Row, depths: range) -> list[str]:
    rates = row["overall"]["acceptance_rate_by_depth"]
    by_depth = [interval(rates[d]) if d < len(rates) else "" for d in depths]
    return [f"{row['overall']['nodes']:.0f}", *by_depth]


def _cycle(row: Row) -> list[str]:
    overall = row["overall"]
    ms, share = overall["cycle_ms"], overall["cycle_share"]
    stages = [f"{ms[stage]:.2f} ({share[stage]:.0%})" for stage in STAGES]
    prefill = f"{overall['prefill_seconds']:.2f} s"
    return [f"{sum(ms.values()):.2f}", *stages, f"{overall['overhead']:.0%}", prefill]
