"""The page OUT/training/report.html: how a run goes, in plots, with all that it needs in the file itself."""

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from treespec.files.atomic import write_text
from treespec.train.plots import Point, Series, draw_figure

REPORT_FILE = "report.html"
METRICS_FILE = "metrics.jsonl"
AGREEMENT_PREFIX = "agreement_"  # and the draft step: the names of these figures in metrics.jsonl
MAX_POINTS = 400  # of a line; of a long run every n-th line of metrics.jsonl is drawn
REFRESH_SECONDS = 30  # after which a browser reads the page of a run that goes on again
PAGE_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
main { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; width: 30rem; max-width: 100% } figure p { margin: 0; text-align: center }
figcaption { font-weight: 600 } svg { width: 100% } svg text { font-size: 11px; fill: #666; text-anchor: middle }
svg text.side { text-anchor: end } .grid { stroke: #ddd } .line { fill: none; stroke-width: 1.6 }
.bar { stroke-width: 1.4 } pre { white-space: pre-wrap }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd } .grid { stroke: #333 } }
"""
Line = dict[str, Any]  # of metrics.jsonl


def write_training_report(
    folder: Path, status: str, lines: Sequence[str] = (), result: Line | None = None
) -> None:
    """Write the page of a run from its metrics.jsonl.

    Args:
        folder: OUT/training.
        status: where the run is, in a sentence.
        lines: further sentences, such as the verdict.
        result: the validation at the end of the run, with its step; None: the run goes on, and a browser reads the
            page again after half a minute.
    """
    rows = list(read_metrics(folder / METRICS_FILE))
    step_lines = limit_points([row for row in rows if "total" in row])
    if result is not None:
        rows.append(result)
    validations = [row for row in rows if row.get("positions")]
    plots = [
        draw_figure("Loss", "step", list_losses(step_lines), may_log=True),
        draw_figure("Agreement by draft step", "step", list_agreements(step_lines, validations)),
        draw_figure("Tokens per step of a chain, held-out", "step", list_lengths(validations)),
        draw_figure("Agreement by depth", "draft step", list_depths(step_lines, validations)),
        draw_figure("Learning rate", "step", [read_series(step_lines, "learning_rate", "rate")]),
        draw_figure(
            "Tokens per second", "step", [read_series(step_lines, "tokens_per_second", "speed")]
        ),
    ]
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    if result is not None:
        refresh = ""
    name = html.escape(folder.parent.name)
    text = html.escape("\n".join(lines))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}'
        f'<meta name="viewport" content="width=device-width"><title>{name}</title><style>{PAGE_STYLE}</style></head>'
        f"<body><h1>{name}</h1><p>{html.escape(status)}</p><pre>{text}</pre>"
        f"<main>{''.join(plots)}</main><p>Agreement: how often the head's most likely token is the target's. Dots "
        "and bars are held-out conversations with 95 % intervals, lines the text that the head trains on."
        "</p></body></html>\n"
    )
    write_text(folder / REPORT_FILE, page)


def read_metrics(file: Path) -> Iterator[Line]:
    """Yield the lines of metrics.jsonl, without one that is half written."""
    if not file.exists():
        return
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            yield line


def limit_points(lines: list[Line]) -> list[Line]:
    """Keep at most about `MAX_POINTS` lines, the last one among them."""
    every = 1 + len(lines) // MAX_POINTS
    return lines[::-1][::every][::-1]


def read_series(lines: Sequence[Line], name: str, title: str, colour: int = 0) -> Series:
    """Read a figure over the steps, where the lines have it."""
    points = [Point(line["step"], line[name]) for line in lines if name in line]
    return Series(title, points, colour)


def list_losses(lines: Sequence[Line]) -> list[Series]:
    """List the losses over the steps: the total first."""
    names = {name for line in lines for name in line if name.startswith(("token_", "feature_"))}
    series = [read_series(lines, "total", "total")]
    for colour, name in enumerate(sorted(names), start=1):
        series.append(read_series(lines, name, name.replace("_", " "), colour))
    return series


def list_agreements(lines: Sequence[Line], validations: Sequence[Line]) -> list[Series]:
    """List the agreement of each draft step: a line on the text of training, dots on held-out text."""
    series = []
    for depth in range(count_depths(lines, validations)):
        name = f"{AGREEMENT_PREFIX}{depth + 1}"
        series.append(read_series(lines, name, f"draft step {depth + 1}", depth))
        points = []
        for row in validations:
            if depth < len(row["agreement"]):
                points.append(Point(row["step"], row["agreement"][depth], get_margin(row, depth)))
        series.append(Series("held-out", points, depth, is_line=False))
    return [one for one in series if one.points]


def count_depths(lines: Sequence[Line], validations: Sequence[Line]) -> int:
    """Count the draft steps that any line has."""
    depths = [len(row["agreement"]) for row in validations]
    for line in lines:
        depths.append(sum(name.startswith(AGREEMENT_PREFIX) for name in line))
    return max(depths, default=0)


def get_margin(row: Line, depth: int) -> float:
    """Get half of the interval of a validation's agreement at a draft step; 0 if it has none."""
    margins = row.get("margins", [])
    if depth >= len(margins):
        return 0.0
    return float(margins[depth])


def list_lengths(validations: Sequence[Line]) -> list[Series]:
    """List the predicted acceptance lengths over the steps, and the decoded one of the end."""
    predicted = []
    decoded = []
    for row in validations:
        point = Point(row["step"], row["acceptance_length"])
        if row.get("length_margin"):
            point = point._replace(margin=row["length_margin"])
        predicted.append(point)
        if row.get("decoded_length"):
            decoded.append(Point(row["step"], row["decoded_length"]))
    series = [
        Series("predicted", predicted),
        Series("predicted, each", predicted, is_line=False),
        Series("decoded", decoded, 1, is_line=False),
    ]
    return [one for one in series if one.points]


def list_depths(lines: Sequence[Line], validations: Sequence[Line]) -> list[Series]:
    """List the last agreement by depth: held-out, on conversations that the head was trained on, and as it trains."""
    series = []
    if validations:
        last = validations[-1]
        held_out = []
        for depth, share in enumerate(last["agreement"]):
            held_out.append(Point(depth + 1, share, get_margin(last, depth)))
        trained = [Point(i, share) for i, share in enumerate(last.get("trained", []), start=1)]
        series += [Series("held-out", held_out, is_line=False), Series("trained", trained, 1)]
    if lines:
        last = lines[-1]
        names = sorted((name for name in last if name.startswith(AGREEMENT_PREFIX)), key=len)
        points = [Point(i, last[name]) for i, name in enumerate(names, start=1)]
        series.append(Series("last steps", points, 2))
    return [one for one in series if one.points]
