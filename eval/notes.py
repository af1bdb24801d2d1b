"""What one must know to read an evaluation's tables, and the verdict that follows from them."""

from collections.abc import Sequence
from typing import Any

from treespec.eval.bootstrap import Figure
from treespec.eval.common import drafted_by
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import batches_of
from treespec.eval.forwards import ROUNDS
from treespec.eval.summary import Row, Summary
from treespec.eval.verdict import (
    FEW,
    MeasuredPair,
    interval,
    noise_of,
    sentences,
    short,
    tree_name,
)


def batch_of(row: Any, rows: Sequence[Row]) -> str:
    return str(row["batch"]) if len({other["batch"] for other in rows}) > 1 else ""


def several(rows: Sequence[Row]) -> bool:
    """Whether there are several drafters."""
    return len({row["drafter"] for row in rows} - {None}) > 1


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """`rrs-wo 2x4`, with drafter and batch where there are several."""
    parts = [short(row["drafter"]) if several(rows) else "", row["method"], tree_name(row["tree"])]
    batch = batch_of(row, rows)
    return " ".join(part for part in parts if part) + (f", batch {batch}" if batch else "")


def compares(summary: Summary) -> bool:
    """Whether the bound belongs to the report: peers, several verifiers or forwards are compared."""
    pairs = {(row["method"], row["tree"]) for row in summary["rows"] if row["drafter"]}
    options = summary["options"]
    compared = options["peers"] or options["contexts"] or len(pairs) > 1
    return bool(compared) and any(row["overall"]["bound"] for row in summary["rows"])


def verdict(summary: Summary) -> list[str]:
    """What is fastest and what does not pay, by batch size; then the peers."""
    # 1. treespec's own pairs, named as `--verifier` names them.
    rows, lines = summary["rows"], []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        noises = {
            a["temperature"]: noise_of(a["speedup"])
            for a in summary["again"]
            if a["batch"] == batch
        }
        pairs = [_measured(row, rows) for row in rows if row["batch"] == batch and row["drafter"]]
        lines += sentences(
            [pair for pair in pairs if pair.tokens_per_second], summary["questions"], noises
        )

    # 2. Other programs at each temperature.
    peers = [row for row in rows if row["peer"] and row["overall"]["speedup"]]
    for temperature in dict.fromkeys(row["temperature"] for row in peers):
        here = [row for row in peers if row["temperature"] == temperature]
        told = ", ".join(
            f"{name_of(row, rows)} {interval(row['overall']['speedup'])}" for row in here
        )
        lines.append(
            f"At temperature {temperature:g} peers have this many times plain decoding's tokens/s: "
            f"{told}."
        )
    return list(dict.fromkeys(lines))


def _measured(row: Row, rows: Sequence[Row]) -> MeasuredPair:
    """A pair for the verdict."""
    overall, batch = row["overall"], batch_of(row, rows)
    name = row["method"] + (f"@{tree_name(row['tree'])}" if row["tree"] else "")
    name = f"{short(row['drafter'])} with {name}" if several(rows) else name
    return MeasuredPair(
        f"{name} in batches of {batch}" if batch else name,
        row["temperature"],
        overall["tokens_per_second"]["value"] or 0.0,
        overall["speedup"],
        overall["acceptance_length"]["value"] or 1.0,
        row["lossless"],
        row["of_fastest"],
        overall["undrafted"] if row["method"] == "auto" else 0.0,
    )


def notes(summary: Summary) -> list[str]:
    """What one must know to read the figures."""
    # 1. What was measured, and on what.
    config, rows, timed = EvalConfig(**summary["options"]), summary["rows"], summary["timed"]
    lines = [
        f"Target {config.target}, {drafted_by(summary['options'])}, questions {config.questions} "
        f"({summary['questions']}), at most {config.max_new_tokens} new tokens a turn, "
        f"tree {config.tree or 'of each verifier by default'}, seed {config.seed}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers "
        "{transformers}, treespec {treespec}.".format(**summary["environment"]),
    ]

    # 2. What the columns mean.
    if timed:
        lines += [
            "Baseline: plain decoding, one token at a time through the same target. Speedup: tokens/s "
            "over the baseline's, totals over totals; by question: the median of the questions' "
            "speedups. Ranges in brackets, which a narrow terminal leaves out in some tables: 95% "
            "bootstrap intervals over questions. Identical: answers (turns) with the baseline's very "
            "tokens, of a server with its text. Nodes: of the tree in one forward.",
            "Overhead: share of a cycle outside the forwards of target and draft model. Prefill: all "
            "prompts through the target and the draft model.",
        ]
    else:
        lines.append(
            "Several processes shared the machine and the questions: their times are no figures."
        )
    if any(row["peer"] for row in rows):
        lines.append(
            "Peers: transformers' methods run on a model of their own, as transformers loads it by "
            "default, in the checkpoint's dtype; assisted generation has transformers' defaults. A "
            "server's tokens are those that it reports, by its client's clock, and it samples by its "
            "own defaults where the options here say nothing. First token: of treespec the prefill "
            "and a cycle, of a server as its client sees it. In a lower precision than float32 "
            "rounding alone may change greedy completions."
        )
    if timed and compares(summary):
        lines.append(
            "Bound: τ · T(1) / (T(N) + T_draft), the speedup if a cycle cost its forwards alone. T(1) is "
            "the target's forward in one-token decoding, T(N) its forward over the tree, T_draft all "
            "forwards of the head in a cycle."
        )
    if summary["forwards"]:
        lines.append(f"Forwards: medians over {ROUNDS} rounds in which all take turns.")
    for again in summary["again"]:
        if (noise := noise_of(again["speedup"])) is not None:
            lines.append(
                f"Baseline again: it answered {again['questions']} of the questions twice at "
                f"temperature {again['temperature']:g}. The interval of the second time's speed "
                f"over the first's reaches {100 * noise:.1f} % from 1: the clock's noise."
            )
    if max(batches := batches_of(config)) > 1:
        lines.append(
            f"Rows are batched: up to {' or '.join(map(str, batches))} questions are answered together, "
            "by the baseline too; the next one takes the place of one that has ended. Tokens/s are the "
            "tokens of all by the clock. A cycle's time is divided evenly among its texts, a cycle "
            "above is one text's share. Intervals take the questions for independent."
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
    ends = {"max_new_tokens": "max_new_tokens", "context": "the target's context"}
    turns = sum(row["turns"] for row in rows)
    for end, cause in ends.items():
        if count := sum(row["ended"][end] for row in rows):
            lines.append(f"{count} of {turns} answers were ended by {cause}.")
    lines += [f"{name} failed: {why}." for name, why in summary["failed"].items()]
    if reasons := summary["left_out"]:
        lines.append(f"Left out, {len(reasons)}: {'; '.join(reasons[:3])}.")
    return lines


def percent(figure: Figure | None) -> str:
    """A share or a difference of shares in percent, with its interval."""
    if figure is None:
        return ""
    values: dict[str, Any] = {**figure}
    scaled: Any = {name: x if x is None else 100 * x for name, x in values.items()}
    return interval(scaled, digits=1)


def right_sentences(rows: Sequence[Row]) -> list[str]:
    """What right answers say about losslessness, temperature by temperature.

    Lossy pairs are left out: they may be right more or less often.
    """
    pairs = [
        (row, right, apart)
        for row in rows
        if row["lossless"] and (right := row["right"]) and (apart := right["difference"])
    ]
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row, _, _ in pairs):
        here = [pair for pair in pairs if pair[0]["temperature"] == temperature]
        beyond = [(row["name"], apart) for row, _, apart in here if _beyond_chance(apart)]
        if all(right["same"] == right["answers"] for _, right, _ in here):
            right = here[0][1]
            told = (
                "every pair answers the very questions rightly that the baseline does: "
                f"{right['right']} of {right['answers']}."
            )
        elif not beyond:
            told = "every pair's share of right answers is the baseline's within the 95% interval."
        else:
            names = ", ".join(f"{name} {percent(apart)}" for name, apart in beyond)
            told = (
                f"the share of right answers is not the baseline's: {names}. Chance does that to one "
                "lossless pair in twenty; `treespec certify` tells."
            )
        lines.append(f"At temperature {temperature:g} {told}")
    return lines


def _beyond_chance(difference: Figure) -> bool:
    """Whether the interval of a difference leaves out 0."""
    low, high = difference["low"], difference["high"]
    return low is not None and high is not None and (low > 0 or high < 0)
