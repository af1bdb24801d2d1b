"""How surely does `treespec certify` find a planted fault? Plants each, many seeds over.

    OMP_NUM_THREADS=1 python docs/scripts/certify_power.py --target runs/target --head runs/head

It asks certify's own questions of the same prompts as `treespec certify` does. The texts of
`model.generate` are compared in the exact runs only: they cost most and find none of these faults.
Every run is a line of --out, so that a later call adds its seeds to those of an earlier one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import faults

from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.eval.certify.config import CertifyConfig
from treespec.eval.certify.run import judge, sample, sample_plain
from treespec.eval.questions import load_questions

DEFAULTS = CertifyConfig(target="target", head="head")
SIZE = ("tokens", "limit", "length", "batch")  # options of certify, and their values in a row
CONFIDENCE = 0.95  # of the bounds on the power and on false alarms


@dataclass(frozen=True)
class Case:
    """A pair, and the fault that is planted into it; None for an exact run."""

    verifier: str
    tree: str
    plant: Callable[[Spec, pytest.MonkeyPatch], None] | None = None


def doubted(spec: Spec, patch: pytest.MonkeyPatch) -> None:
    faults.doubted_token_dropped(patch)


def on_spec(plant: Callable[[Spec], None]) -> Callable[[Spec, pytest.MonkeyPatch], None]:
    return lambda spec, patch: plant(spec)


CASES = {
    "hotter": Case("single", "chain:5", on_spec(faults.draws_from_a_hotter_law)),
    "phantoms": Case("optimal", "sampled", on_spec(faults.phantoms_dropped)),
    "phantoms-static": Case("optimal", "eagle", on_spec(faults.phantoms_dropped)),
    "coins": Case("single", "chain:5", on_spec(faults.coins_reused)),
    "seeded": Case("single", "chain:5", on_spec(faults.seeded_anew)),
    "doubted": Case("single", "confident:threshold=0.3", doubted),
    "exact": Case("single", "chain:5"),
    "exact-sampled": Case("optimal", "sampled"),
    "exact-confident": Case("single", "confident:threshold=0.3"),
}


Row = dict[str, Any]  # of --out


def examined(spec: Spec, name: str, prompts: list[list[int]], config: CertifyConfig) -> Row:
    """One run: the p-value of each question, their threshold, and seconds of wall clock and CPU."""
    case, wall, cpu = CASES[name], time.perf_counter(), time.process_time()
    spec = spec.configured(case.tree, case.verifier)
    with pytest.MonkeyPatch.context() as patch:
        if case.plant:
            case.plant(spec, patch)
        ours = sample(spec, prompts, config)
    plain = [] if case.plant else sample_plain(spec, prompts, ours, config)
    tests = judge(spec, [], ours, plain, config)["tests"][1:]
    return {
        "case": name,
        "size": size_of(config),
        "seed": config.seed,
        "tokens": sum(len(text.output) for text in ours),
        "error": tests[0]["error"],
        "p_values": {test["test"]: test["p_value"] for test in tests},
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
    }


def size_of(config: CertifyConfig) -> list[int]:
    return [getattr(config, option) for option in SIZE]


def options_of(size: Sequence[int]) -> str:
    """Those that are not certify's defaults."""
    usual = size_of(DEFAULTS)
    given = zip(SIZE, size, usual, strict=True)
    words = [f"--{name} {value}" for name, value, default in given if value != default]
    return f"`{' '.join(words)}`" if words else "defaults"


def bound(found: int, runs: int) -> float:
    """Clopper and Pearson's lower bound on the chance of what was found in so many of the runs."""
    return float(binomtest(found, runs, alternative="greater").proportion_ci(CONFIDENCE).low)


def table(rows: list[Row]) -> str:
    """The runs of each case and size in Markdown."""
    columns = (
        "case",
        "pair",
        "options",
        "tokens",
        "rejected",
        "bound",
        "by",
        "log10 p, worst (error)",
        "CPU s",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, size in dict.fromkeys((row["case"], tuple(row["size"])) for row in rows):
        case = CASES[name]
        runs = [row for row in rows if (row["case"], tuple(row["size"])) == (name, size)]
        rejected = sum(min(row["p_values"].values()) < row["error"] for row in runs)
        # 1. The question with the least median p-value.
        logs = {
            question: sorted(log10(max(row["p_values"][question], 1e-300)) for row in runs)
            for question in runs[0]["p_values"]
        }
        question = min(logs, key=lambda one: statistics.median(logs[one]))
        # 2. The bound: at least so often found, or at most so often rejected though exact.
        if case.plant:
            limit = f"≥ {bound(rejected, len(runs)):.3f}"
        else:
            limit = f"≤ {1 - bound(len(runs) - rejected, len(runs)):.3f}"
        margin = f"{statistics.median(logs[question]):.1f}, {logs[question][-1]:.1f}"
        lines.append(
            f"| {name} | `{case.verifier}`, `{case.tree}` | {options_of(size)} "
            f"| {statistics.median(row['tokens'] for row in runs):.0f} "
            f"| {rejected} of {len(runs)} | {limit} | {question} "
            f"| {margin} ({log10(runs[0]['error']):.1f}) "
            f"| {statistics.median(row['cpu'] for row in runs):.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", default="power.jsonl", type=Path)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--seeds", default="0:10", help="FIRST:END")
    for option in SIZE:
        default = getattr(DEFAULTS, option)
        parser.add_argument(f"--{option}", default=default, type=int, help="as in treespec certify")
    given = parser.parse_args(arguments)

    # 1. The pair and the prompts, as certify has them.
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    known = [json.loads(line) for line in lines]
    done = {(row["case"], *row["size"], row["seed"]) for row in known}
    spec = load(given.target, given.head)
    questions = load_questions(DEFAULTS.questions)[0][: given.limit]
    messages = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    prompts = [spec.encode(message) for message in messages]

    # 2. Every case with every seed that --out does not have yet.
    first, end = map(int, given.seeds.split(":"))
    for seed in range(first, end):
        for name in given.cases.split(","):
            size = {option: getattr(given, option) for option in SIZE}
            if (name, *size.values(), seed) in done:
                continue
            config = CertifyConfig(target=given.target, head=given.head, seed=seed, **size)
            known.append(examined(spec, name, prompts, config))
            with given.out.open("a") as file:
                file.write(json.dumps(known[-1]) + "\n")
    print(table(known))


if __name__ == "__main__":
    main()
