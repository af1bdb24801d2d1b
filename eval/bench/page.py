"""OUT/report.html of a benchmark, from bench.json and OUT/trees.json."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from treespec.api.spec import Spec
from treespec.eval.bench.config import BenchConfig
from treespec.eval.bench.result import BenchResult, ForwardTime, RowFigures
from treespec.eval.bench.rows import ONE_TOKEN, PLAIN, Draft
from treespec.eval.bench.table import report_of
from treespec.eval.common import STAGE_NAMES, STAGES, drafted_by, seed_of
from treespec.eval.page.charts import Bar, Chart, Group, Stack, Style, bar_of, value_of
from treespec.eval.page.page import Page, write_page
from treespec.eval.page.setup import setup
from treespec.eval.page.trees import fitting, read_trees, traced, write_trees
from treespec.eval.questions import Question
from treespec.eval.verdict import interval


def page_of(result: BenchResult, out: Path) -> Page:
    """Charts over the benchmark's tables, and the trees of OUT/trees.json, if it is there."""
    config, trees = result["config"], read_trees(out)
    target = PurePath(str(config["target"])).name
    of_machine = trees.machine if trees else {}
    rows = result["rows"]
    return Page(
        title=f"{target}: where the time goes",
        subtitle=f"{drafted_by(config)}, {result['questions']} questions of {config['questions']}",
        report=report_of(result),
        charts=[speed(rows), bounds(rows), costs(rows), forwards(result["forwards"])],
        setup=setup("bench", BenchConfig, config, result["environment"], of_machine),
        trees=trees,
    )


def write(result: BenchResult, out: Path) -> None:
    write_page(out, page_of(result, out))


def record(
    out: Path,
    spec: Spec,
    drafts: Mapping[str, Draft],
    heats: Sequence[float],
    questions: Sequence[Question],
    seed: int,
) -> None:
    """OUT/trees.json: a short answer with each verifier and tree, after the measurement."""
    question = fitting(questions, [spec])
    if question is None:
        return
    runs = []
    for heat in heats:
        for name, draft in drafts.items():
            own_seed = seed_of(seed, question.question_id, 0, f"{name}-t{heat:g}")
            drafting = spec.configured(*draft)
            title = f"{name}, temperature {heat:g}"
            runs.append(traced(title, drafting, question, heat, own_seed))
    write_trees(out, question, runs)


def speed(rows: Sequence[RowFigures]) -> Chart:
    """Overall tokens/s by those of one-token decoding, transformers' methods too."""

    def bar(row: RowFigures, _: RowFigures) -> Bar | None:
        if not row["speed"]:
            return None
        figure = row["speed"]["overall"]["over_one_token"]
        style: Style = "plain" if row["name"] in PLAIN else "peer" if row["peer"] else "ours"
        return bar_of(row["name"], figure, interval(figure), style)

    return Chart(
        title="How much faster, beside transformers",
        text="Tokens a second over those of treespec's one-token decoding, totals over totals, prompts "
        "included. Violet bars are transformers' own ways to generate. The whisker is the 95 % interval "
        "over questions.",
        groups=by_temperature(rows, bar),
        reference=1.0,
    )


def bounds(rows: Sequence[RowFigures]) -> Chart:
    """Speedups beside what the forwards alone would give."""

    def bar(row: RowFigures, _: RowFigures) -> Bar | None:
        if not row["cycle"] or row["name"] in PLAIN:
            return None
        figure = row["cycle"]["overall"]["speedup"]
        most = value_of(row["cycle"]["overall"]["bound"])
        said = f"{value_of(figure):.2f} of {most:.2f}"
        return bar_of(row["name"], figure, said, marker=most)

    return Chart(
        title="The speedup and its bound",
        text="Without prompts. The bound is τ · T(1) / (T(N) + T_draft): what would be left if a cycle "
        "were its forwards alone. From the bar to the diamond is what drafting, verifying and keeping "
        "cost besides; beyond the diamond only a better tree or a cheaper forward helps.",
        groups=by_temperature(rows, bar),
        reference=1.0,
        marker="bound",
    )


def costs(rows: Sequence[RowFigures]) -> Chart:
    """A cycle's stages in cycles of one-token decoding, and the tokens that it brings."""

    def stack(row: RowFigures, plain: RowFigures) -> Stack | None:
        if not (row["cycle"] and plain["cycle"]):
            return None
        unit = value_of(plain["cycle"]["cycle"])
        parts = [value_of(row["cycle"][stage]) / unit for stage in STAGES]
        tau, cost = value_of(row["cycle"]["acceptance_length"]), sum(parts)
        said = f"{tau:.2f} / {cost:.2f} = {tau / cost:.2f}"
        return Stack(row["name"], parts, said, marker=tau)

    return Chart(
        title="What a cycle costs and what it brings",
        text="The bar is the time of a cycle by stage (medians over questions), in cycles of one-token "
        "decoding; the diamond is the tokens that it brings, τ. Drafting pays where the diamond lies to "
        "the right of the bar's end.",
        groups=by_temperature(rows, stack),
        legend=[STAGE_NAMES[stage] for stage in STAGES],
        reference=1.0,
        marker="τ",
    )


def forwards(timed: Sequence[ForwardTime]) -> Chart:
    """The target's forward by the number of nodes, a group a context."""
    groups: dict[int, list[Bar]] = {}
    for one in timed:
        if one["what"] == "target":
            ms, count = one["ms"], one["nodes"]
            name = f"{count} node{'s' if count > 1 else ''}"
            bar = bar_of(name, ms, f"{interval(ms)} ms")
            groups.setdefault(one["context"], []).append(bar)
    return Chart(
        title="What a node costs the target",
        text="The time of one forward by the size of its tree. While the bars are equally long, nodes "
        "are free and a larger tree pays; where they grow with the nodes, each node has to earn its time.",
        groups=[Group(f"context {context}", bars) for context, bars in groups.items()],
    )


def by_temperature(
    rows: Sequence[RowFigures], draw: Callable[[RowFigures, RowFigures], Bar | Stack | None]
) -> list[Group]:
    """draw: (row, one-token decoding beside it) -> what the row looks like, None for nothing."""
    groups: dict[float, list[Bar | Stack]] = {}
    plain = {row["temperature"]: row for row in rows if row["name"] == ONE_TOKEN}
    for row in rows:
        if drawn := draw(row, plain[row["temperature"]]):
            groups.setdefault(row["temperature"], []).append(drawn)
    return [Group(f"temperature {heat:g}", bars) for heat, bars in sorted(groups.items())]
