"""The endings of the commands that measure: `treespec.cli.endings` has their form and thresholds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treespec.cli.endings import (
    GOOD_FIRST_DRAFTS,
    GOOD_GAP_POINTS,
    GOOD_SHIFT,
    ClosingLines,
    judge,
    judge_tau,
    write_command,
)
from treespec.draft.spec import DrafterSpec
from treespec.eval.acceptance.config import AcceptanceConfig, TauConfig
from treespec.eval.config import (
    CalibrateConfig,
    CertifyConfig,
    DoctorConfig,
    EvalConfig,
    SkipSearchConfig,
    TreeConfig,
    is_oracle,
)
from treespec.train.config import TrainConfig

Row = Mapping[str, Any]
# first words of the sentences of `doctor` that more training mends
TRAINING_FAULTS = ("Little trained", "Off-policy text", "Untrained, or for another target")


def end_eval(config: EvalConfig, rows: Sequence[Row]) -> ClosingLines:
    """Make the ending of `eval`. rows: of its report."""
    written = f"Ledger and report are in {Path(config.out).resolve()}; look at report.html there"
    drafting_rows = [row for row in rows if row["drafter"] and not is_oracle(row["drafter"])]
    compared_rows = [row for row in drafting_rows if row["overall"]["speedup"]]
    if not compared_rows:
        next_command = write_command("eval", EvalConfig, config, out=f"{config.out}-timed")
        return ClosingLines(
            written, "Not judged: no speed was compared with one token at a time", next_command
        )
    best = max(compared_rows, key=lambda row: row["overall"]["speedup"]["value"] or 0.0)
    speedup = best["overall"]["speedup"]
    low = speedup["low"]
    if low is None:
        low = speedup["value"] or 0.0
    name = f"{best['method']} of {best['drafter']} at temperature {best['temperature']:g}"
    finding = f"{name} is {speedup['value'] or 0.0:.2f} times as fast as one token at a time"
    pair = {
        "head": None,
        "drafter": best["drafter"],
        "verifier": best["method"],
        "tree": best["tree"],
    }
    if low > 1:
        finding += f", at least {low:.2f} times by its interval"
        pair |= {"out": "runs/certificate.json", "dtype": None}
        return ClosingLines(
            written, judge(True, finding), write_command("certify", CertifyConfig, config, **pair)
        )
    finding += f", which is not above 1 by its interval (from {low:.2f})"
    return ClosingLines(
        written, judge(False, finding), write_repair_command(config, best["drafter"])
    )


def write_repair_command(config: EvalConfig, drafter: str) -> str:
    """Write the command to type after drafts that do not pay: `doctor` for a head, else the text itself drafts."""
    spec = DrafterSpec.parse(drafter)
    if spec.kind.is_head:
        return write_command("doctor", DoctorConfig, config, head=spec.place)
    return write_command(
        "eval", EvalConfig, config, head=None, drafter="suffix:tokens=0", out=f"{config.out}-suffix"
    )


def end_certify(
    config: CertifyConfig, certificate: Mapping[str, Any], verdict: str
) -> ClosingLines:
    """Make the ending of `certify`. verdict: its words."""
    from treespec.serve.options import ServeConfig

    written = f"Report: {Path(config.out).resolve()}"
    if not certificate["passed"]:
        another_seed = {"out": config.out, "seed": config.seed + 1, "endpoint": config.endpoint}
        command = write_command("certify", CertifyConfig, config, **another_seed)
        return ClosingLines(
            written, judge(False, f"{verdict} Does another seed find it, too?"), command
        )
    shift = certificate["tests"][1]["finds"]
    if shift > GOOD_SHIFT:
        tokens = round(config.tokens * (shift / GOOD_SHIFT) ** 2)
        more = {"out": config.out, "tokens": tokens, "endpoint": config.endpoint}
        verdict = f"{verdict} That is more than {GOOD_SHIFT:.0%}: sample more tokens"
        return ClosingLines(
            written,
            judge(False, verdict),
            write_command("certify", CertifyConfig, config, **more),
        )
    command = write_command("serve", ServeConfig, config, dtype=None)
    if config.endpoint:
        peers = {"peers": config.endpoint, "out": "runs/eval", "dtype": None}
        command = write_command("eval", EvalConfig, config, **peers)
    return ClosingLines(written, judge(True, verdict), command)


def end_acceptance(config: AcceptanceConfig, sweeps: Sequence[Sequence[Row]]) -> ClosingLines:
    """Make the ending of `acceptance`: the method with the highest rate, and its largest gap to α*."""
    written = f"Rates are in {Path(config.out).resolve()}; look at acceptance.html there"
    rates: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for row in [row for rows in sweeps for row in rows if row["gap"] is not None]:
        rates.setdefault(row["method"], []).append(row["rate"]["value"])
        gaps.setdefault(row["method"], []).append(100 * row["gap"]["value"])
    most_cases = max(map(len, rates.values()))
    complete = [method for method, values in rates.items() if len(values) == most_cases]
    best = max(complete, key=lambda method: sum(rates[method]))
    gap = max(gaps[best])
    relation = "at most"
    if gap > GOOD_GAP_POINTS:
        relation = "more than"
    finding = f"{best} is {gap:.1f} points below α* at worst, {relation} {GOOD_GAP_POINTS:g}"
    if config.given:
        command = "treespec acceptance --target demo --out runs/acceptance"
    else:
        command = write_command("tau", TauConfig, config, out="runs/tau")
    return ClosingLines(written, judge(gap <= GOOD_GAP_POINTS, finding), command)


def end_tau(config: TauConfig, rows: Sequence[Row]) -> ClosingLines:
    """Make the ending of `tau`: the pair with the largest τ."""
    from treespec.eval.acceptance.tau_pairs import OWN_TREE_LABEL

    written = f"The figures are in {Path(config.out).resolve()}; look at tau.html there"
    best = max(rows, key=lambda row: row["tau"]["value"])
    pair = best["verifier"]
    if best["tree"] != OWN_TREE_LABEL:
        pair = f"{pair}@{best['tree']}"
    written_drafters = {drafter.short: drafter.written for drafter in config.drafters}
    command = write_command(
        "eval",
        EvalConfig,
        config,
        head=None,
        drafter=written_drafters[best["drafter"]],
        verifier=pair,
        temperature=f"{best['temperature']:g}",
        out="runs/eval",
    )
    verdict = judge_tau(best["tau"]["value"])
    return ClosingLines(
        written, f"{verdict} ({pair}, temperature {best['temperature']:g})", command
    )


def end_calibrate(config: CalibrateConfig, file: Path) -> ClosingLines:
    """Make the ending of `calibrate`: how often the first draft is right. file: calibration.json."""
    from treespec.draft.calibration import GREEDY_TEMPERATURE, load_calibration

    calibration = load_calibration(file.parent)
    assert calibration is not None
    share = calibration.rates[f"{GREEDY_TEMPERATURE:g}"][0]
    relation = "below"
    if share >= GOOD_FIRST_DRAFTS:
        relation = "at least"
    finding = f"{share:.0%} of the most likely drafts are right, {relation} {GOOD_FIRST_DRAFTS:.0%}"
    written = f"Calibration is in {file.resolve()}"
    command = write_command("eval", EvalConfig, config, out="runs/eval")
    if share < GOOD_FIRST_DRAFTS:
        command = write_command("doctor", DoctorConfig, config)
    return ClosingLines(written, judge(share >= GOOD_FIRST_DRAFTS, finding), command)


def end_tree(config: TreeConfig, expected_tau: float) -> ClosingLines:
    """Make the ending of `tree`."""
    command = write_command("eval", EvalConfig, config, tree=config.out, out="runs/eval")
    return ClosingLines(f"The tree is in {config.out}", judge_tau(expected_tau), command)


def end_skip_search(config: SkipSearchConfig, speedup: float, depth: int) -> ClosingLines:
    """Make the ending of `skip-search`. depth: of the chain that `speedup` is predicted for."""
    finding = f"predicted to be {speedup:.2f} times as fast as one token at a time"
    drafting: dict[str, object] = {
        "drafter": f"self:{config.out}",
        "tree": f"chain:{depth}",
        "out": "runs/eval",
    }
    if speedup <= 1:
        drafting |= {"drafter": "suffix:tokens=0", "tree": None}
    command = write_command("eval", EvalConfig, config, **drafting)
    return ClosingLines(
        f"The skipped sublayers are in {config.out}", judge(speedup > 1, finding), command
    )


def end_doctor(config: DoctorConfig, verdict: Sequence[str]) -> ClosingLines:
    """Make the ending of `doctor`. verdict: a sentence for each fault."""
    from treespec.eval.doctor import NO_FAULT

    written = f"The report is in {Path(config.out).resolve()}"
    command = write_command("eval", EvalConfig, config, out="runs/eval")
    if verdict[0].startswith(NO_FAULT):
        return ClosingLines(written, judge(True, "no usual fault shows"), command)
    first_words = verdict[0].partition(":")[0]
    if first_words in TRAINING_FAULTS:
        options = {"head": None, "from_head": config.head, "out": "heads/next"}
        options |= {"data": "answers/conversations.jsonl", "dtype": None, "device_map": None}
        command = write_command("train", TrainConfig, config, **options)
    elif first_words == "Flat":
        command = write_command("calibrate", CalibrateConfig, config)
    else:
        command = write_command("doctor", DoctorConfig, config, out=config.out)
    faults = "1 fault shows"
    if len(verdict) > 1:
        faults = f"{len(verdict)} faults show"
    return ClosingLines(written, judge(False, f"{faults}: the verdict says what to mend"), command)
