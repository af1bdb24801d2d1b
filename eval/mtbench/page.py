"""OUT/report.html of an evaluation, from its summary and OUT/trees.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from treespec.api.spec import Spec
from treespec.eval.bootstrap import Figure
from treespec.eval.common import STAGE_NAMES, STAGES, drafted_by, seed_of
from treespec.eval.mtbench.config import Configuration, EvalConfig
from treespec.eval.mtbench.table import report_of
from treespec.eval.page.charts import Bar, Chart, Grid, Group, Stack, Style, bar_of
from treespec.eval.page.page import Page, write_page
from treespec.eval.page.setup import setup
from treespec.eval.page.trees import fitting, read_trees, traced, write_trees
from treespec.eval.questions import Question
from treespec.eval.verdict import interval, short, tree_name

Row = Mapping[str, Any]  # of a configuration
DEPTHS = 10  # of which the stack of τ has parts; the last one takes the deeper ones too


def page_of(summary: Any, out: Path) -> Page:
    """Charts over the summary's tables, and the trees of OUT/trees.json, if it is there."""
    rows, config = summary["configurations"], summary["config"]
    trees = read_trees(out)
    charts: list[Chart | Grid] = [speed(rows), lengths(rows), costs(rows), categories(rows)]
    questions = f"{summary['questions']} {'question' if summary['questions'] == 1 else 'questions'}"
    return Page(
        title=f"{PurePath(config['target']).name}: acceptance and speed",
        subtitle=f"{drafted_by(config)}, {questions} of {config['questions']}",
        report=report_of(summary),
        charts=charts,
        setup=setup(
            "eval", EvalConfig, config, summary["environment"], trees.machine if trees else {}
        ),
        trees=trees,
    )


def write(summary: Any, out: Path) -> None:
    write_page(out, page_of(summary, out))


def record(
    out: Path,
    specs: Mapping[Configuration, Spec],
    questions: Sequence[Question],
    config: EvalConfig,
) -> None:
    """OUT/trees.json: a short answer of each configuration that drafts, after the measurement."""
    drafting = {one: spec for one, spec in specs.items() if spec.source}
    question = fitting(questions, drafting.values())
    if question is None:
        return
    rows = [asdict(one) for one in drafting]
    sampling = {"top_k": config.top_k, "top_p": config.top_p}
    runs = []
    for row, (one, spec) in zip(rows, drafting.items(), strict=True):
        name = f"{name_of(row, rows)}, temperature {one.temperature:g}"
        seed = seed_of(config.seed, question.question_id, 0, one.model_id)
        runs.append(traced(name, spec, question, one.temperature, seed, **sampling))
    write_trees(out, question, runs)


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """`rrs-wo 2x4`, with the drafter where there are several."""
    several = len({one["drafter"] for one in rows} - {None}) > 1
    parts = [short(row["drafter"]) if several else "", row["verifier"], tree_name(row["tree"])]
    return " ".join(part for part in parts if part)


def speed(rows: Sequence[Row]) -> Chart:
    """Speedups, or tokens/s where there is no baseline."""
    compared = any(row["overall"]["speedup"] for row in rows)
    name = "speedup" if compared else "tokens_per_second"

    def bar(row: Row) -> Bar:
        whole: Figure = {"value": 1.0, "low": None, "high": None}  # the baseline's speedup
        figure: Figure = row["overall"][name] or whole
        style: Style = "plain" if row["verifier"] == "baseline" else "ours"
        style = style if row["lossless"] else "lossy"
        return bar_of(name_of(row, rows), figure, interval(figure, 2 if compared else 1), style)

    return Chart(
        title="How much faster" if compared else "Tokens a second",
        text="Tokens a second over those of plain decoding, one token at a time through the same "
        "target; prompts included. The whisker is the 95 % interval over questions; a whisker that "
        "crosses the dashed line at 1, or ends within the clock's noise of it, leaves open whether "
        "drafting pays."
        if compared
        else "Prompts included; the whisker is the 95 % interval over questions.",
        groups=by_temperature(rows, bar),
        reference=1.0 if compared else None,
    )


def lengths(rows: Sequence[Row]) -> Chart:
    """τ as the sum of what each depth adds to it."""
    # 1. The depths that get a part of their own.
    drafted = [row for row in rows if row["verifier"] != "baseline"]
    deepest = max((len(row["overall"]["accepted_by_depth"]) for row in drafted), default=0)
    shown = min(deepest, DEPTHS)

    # 2. A row's parts: the target's own token, then one part a depth.
    def stack(row: Row) -> Stack:
        overall = row["overall"]
        tau = overall["acceptance_length"]
        shares = [count / overall["cycles"] for count in overall["accepted_by_depth"]]
        by_depth = [*shares[: shown - 1], sum(shares[shown - 1 :])] if shown else []
        by_depth += [0.0] * (shown - len(by_depth))
        own = max(tau["value"] - sum(by_depth), 0.0)
        low, high = tau["low"], tau["high"]
        return Stack(name_of(row, rows), [own, *by_depth], interval(tau), low, high)

    # 3. The chart.
    names = [f"depth {depth}" for depth in range(1, shown + 1)]
    if deepest > shown:
        names[-1] += " and deeper"
    return Chart(
        title="What the acceptance length τ is made of",
        text="τ is the number of tokens that a forward of the target brings: its own one, and 1 more "
        "for each depth of the tree at which a node is accepted. A part is as long as the share of "
        "cycles that accept this depth, so each is shorter than the one before. A wide first part "
        "is a good first guess; parts that shrink slowly are a draft model that stays right.",
        groups=by_temperature(drafted, stack),
        legend=["the target's own", *names],
        shade="step",
    )


def costs(rows: Sequence[Row]) -> Chart:
    """A cycle's stages, in the time of one-token decoding's cycles where that was measured."""
    # 1. The unit: a cycle of the baseline at each temperature.
    baselines = {
        row["temperature"]: sum(row["overall"]["cycle_ms"].values())
        for row in rows
        if row["verifier"] == "baseline"
    }
    compared = bool(baselines)

    # 2. A row's stages in that unit.
    def stack(row: Row) -> Stack:
        ms, tau = row["overall"]["cycle_ms"], row["overall"]["acceptance_length"]["value"]
        unit = baselines.get(row["temperature"], 1.0)
        parts = [ms[stage] / unit for stage in STAGES]
        cost = sum(ms.values()) / unit
        if not compared:
            return Stack(name_of(row, rows), parts, f"{cost:.1f} ms")
        said = f"{tau:.2f} / {cost:.2f} = {tau / cost:.2f}"
        return Stack(name_of(row, rows), parts, said, marker=tau)

    # 3. The chart.
    return Chart(
        title="What a cycle costs and what it brings",
        text="The bar is the time of a cycle by stage, in cycles of plain decoding; the diamond is "
        "the tokens that it brings, τ. Drafting pays where the diamond lies to the right of the bar's "
        "end, and the quotient is the speedup without prompts."
        if compared
        else "The time of a cycle by stage, in ms.",
        groups=by_temperature(rows, stack),
        legend=[STAGE_NAMES[stage] for stage in STAGES],
        reference=1.0 if compared else None,
        marker="τ" if compared else "",
    )


def categories(rows: Sequence[Row]) -> Grid:
    """τ of each drafting configuration by category."""
    drafted = [row for row in rows if row["verifier"] != "baseline"] or list(rows)
    names = list(drafted[0]["categories"])
    cells = [
        (
            f"{name_of(row, rows)}, T {row['temperature']:g}",
            [row["categories"][name]["acceptance_length"]["value"] for name in names],
        )
        for row in drafted
    ]
    return Grid(
        title="τ by category",
        text="How far the draft model follows depends on the text. Speedups are in the tables.",
        columns=names,
        rows=cells,
    )


def by_temperature(rows: Sequence[Row], draw: Callable[[Row], Bar | Stack]) -> list[Group]:
    heats = list(dict.fromkeys(row["temperature"] for row in rows))
    return [
        Group(
            f"temperature {heat:g}",
            [draw(row) for row in rows if row["temperature"] == heat],
        )
        for heat in heats
    ]
