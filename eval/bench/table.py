"""A benchmark as people read it: tables, notes and a verdict."""

from collections.abc import Callable
from typing import Any

from treespec.eval.bench.config import NODES
from treespec.eval.bench.forwards import FRONTIERS, WAITING
from treespec.eval.bench.rows import ONE_TOKEN, label
from treespec.eval.common import STAGE_NAMES, drafted_by
from treespec.eval.report import Report, Table
from treespec.eval.verdict import Pair, interval, sentences

Measured = dict[str, Any]  # of one number of padded layers


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/bench.md and the terminal show."""
    paddings = result["paddings"]
    tables = []
    for title, what in (
        ("The target's forward in ms, by nodes", "target"),
        ("The head's step in ms", "extend"),
    ):
        if any(timed["what"] == what for measured in paddings for timed in measured["forwards"]):
            names, lines = forwards(paddings, what)
            tables.append(Table(title, ["", "context"], names, lines))
    cycles = ["cycle", *STAGE_NAMES.values(), "overhead"]
    tables.append(
        Table("A cycle in ms", ["", "T"], cycles, rows(paddings, "cycle", cycle), brief=True)
    )
    limits = [
        "τ",
        "tokens/s",
        "speedup",
        "bound",
        "speedup/bound",
        "overall: speedup",
        "bound",
        "speedup/bound",
    ]
    title = "Speedup and its bound; τ: tokens per target forward"
    tables.append(Table(title, ["", "T"], limits, rows(paddings, "cycle", limit)))
    ratios = ["by model.generate", "by one token"]
    beside = ["tokens", "tokens/s", *ratios, "overall: tokens/s", *ratios, "identical"]
    tables.append(
        Table(
            "Beside transformers, prefill included",
            ["", "T"],
            beside,
            rows(paddings, "speed", speed),
        )
    )
    if together := [row for measured in paddings for row in measured["batches"]]:
        over = ["tokens/s", "by one token", "by the smallest batch"]
        tables.append(
            Table(
                "Batches", ["", "T"], ["texts", "tokens", *over], [batch(row) for row in together]
            )
        )
    return Report(tables, notes(result), verdict(paddings))


def verdict(paddings: list[Measured]) -> list[str]:
    """Of the whole run, prefill included: the fastest of ours, what is slower, and the fastest of transformers."""
    lines = []
    for measured in paddings:
        where = f"Padded, +{measured['added']} layers: " if measured["added"] else ""
        pairs = [
            (row["peer"], _pair(row))
            for row in measured["rows"]
            if row["speed"] and row["name"] != ONE_TOKEN
        ]
        lines += [where + line for line in sentences([pair for peer, pair in pairs if not peer])]
        peers = [pair for peer, pair in pairs if peer]
        for temperature in dict.fromkeys(pair.temperature for pair in peers):
            best = max(
                (p for p in peers if p.temperature == temperature),
                key=lambda pair: pair.tokens_per_second,
            )
            times = f"{best.name}, {interval(best.speedup)} times plain decoding"
            lines.append(
                f"{where}At temperature {temperature:g} the fastest of transformers' own is {times}."
            )
    return lines


def _pair(row: Measured) -> Pair:
    overall = row["speed"]["overall"]
    return Pair(
        row["name"],
        row["temperature"],
        overall["tokens_per_second"]["value"],
        overall["over_one_token"],
    )


def forwards(paddings: list[Measured], what: str) -> tuple[list[str], list[list[str]]]:
    """(columns, lines) of the forwards: a line a context."""
    names = {("target", n): str(n) for n in NODES}
    if what != "target":
        names = {("begin", WAITING): f"begin, {WAITING} tokens"} | {
            ("extend", n): f"level of {n}" for n in FRONTIERS
        }
    lines = []
    for measured in paddings:
        ms = {(f["context"], f["what"], f["nodes"]): f["ms"] for f in measured["forwards"]}
        for context in dict.fromkeys(at[0] for at in ms):
            cells = [interval(ms[context, *at]) for at in names]
            name = label("target" if what == "target" else "head", measured["added"])
            lines.append([name, str(context), *cells])
    return list(names.values()), lines


def rows(
    paddings: list[Measured], part: str, cells: Callable[[Measured], list[str]]
) -> list[list[str]]:
    """A line a row that has such a part, or has failed to have it."""
    return [
        [row["label"], f"{row['temperature']:g}", *cells(row)]
        for measured in paddings
        for row in measured["rows"]
        if row[part] or (part == "speed" and row["failed"])
    ]


def cycle(row: Measured) -> list[str]:
    found = row["cycle"]
    return [
        *(interval(found[name]) for name in ("cycle", *STAGE_NAMES)),
        f"{found['overhead']['value']:.0%}",
    ]


def limit(row: Measured) -> list[str]:
    found = row["cycle"]
    both = [
        interval(part[n])
        for part in (found, found["overall"])
        for n in ("speedup", "bound", "speedup_by_bound")
    ]
    return [interval(found["acceptance_length"]), interval(found["tokens_per_second"], 1), *both]


def speed(row: Measured) -> list[str]:
    if row["failed"]:
        return ["failed", *[""] * 7]
    found, same, answers = row["speed"], row["same_as_one_token"], row["answers"]
    cells = [str(sum(answer["tokens"] for answer in answers))]
    for part in (found, found["overall"]):
        cells += [
            interval(part["tokens_per_second"], 1),
            interval(part["over_generate"]),
            interval(part["over_one_token"]),
        ]
    return [*cells, "" if same is None else f"{same} of {len(answers)}"]


def batch(row: Measured) -> list[str]:
    over = (interval(row[name]) for name in ("over_one_token", "over_smallest"))
    numbers = str(row["batch"]), str(row["tokens"]), interval(row["tokens_per_second"], 1)
    return [row["label"], f"{row['temperature']:g}", *numbers, *over]


def failures(paddings: list[Measured]) -> list[str]:
    """Why a peer has no figures."""
    failed = [row for measured in paddings for row in measured["rows"] if row["failed"]]
    return [
        f"{row['label']} at temperature {row['temperature']:g} failed: {row['failed']}."
        for row in failed
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the figures."""
    config = result["config"]
    of_peers = "the very model in memory, with the order of weights and the attention that treespec gives it"
    if config["stock_peers"]:
        of_peers = "a model of their own, as transformers loads it"
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, assistant {config['assistant'] or 'none'}, questions "
        f"{config['questions']} ({result['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers {transformers}, "
        "treespec {treespec}; all rows took turns.".format(**result["environment"]),
        f"Medians, of forwards over {config['rounds']} rounds, else over questions, with 95% bootstrap intervals in "
        "brackets; overall, and τ: totals over totals of all questions. Sampled answers may end after a few tokens, "
        "which a median over questions counts like long ones.",
        "Bound: τ · T(1) / (T(N) + T_draft): the target's forward in one-token decoding, over that on the tree and all "
        "the head's forwards of a cycle. Speedup: tokens/s over one-token decoding's, without prefill. "
        "Overhead: share of a cycle outside these forwards.",
        "By model.generate, by one token: tokens/s over theirs on the same question, from prompt to last token. "
        "Identical: greedy answers with the very tokens of one-token decoding; in a lower precision than float32 "
        f"rounding alone may change them. Peers run on {of_peers}; assisted generation has transformers' defaults.",
    ]
    if config["batches"]:
        lines.append(
            "Batches: every forward takes that many texts, and the next text takes the place of one "
            "that has ended. Tokens of all texts by the clock, prefill included. By one token: over "
            "one-token decoding of the same number of texts."
        )
    for measured in result["paddings"]:
        if measured["added"]:
            same = (
                "to the bit"
                if not measured["logit_difference"]
                else f"within {measured['logit_difference']:.2g}"
            )
            lines.append(
                f"Padded, +{measured['added']} layers: {measured['layers']} layers, of which the last "
                f"{measured['added']} compute and write zeros; the logits are the same {same}."
            )
    lines += failures(result["paddings"])
    if left_out := result["left_out"]:
        lines.append(f"Questions left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines
