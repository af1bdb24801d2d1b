"""The commands that measure: eval, certify, acceptance, tau, calibrate, tree, skip-search, doctor, report."""

from pathlib import Path
from typing import Annotated, Any

import typer

from treespec.cli.early import (
    begin_answers,
    check_inputs_early,
    check_questions,
    check_text,
)
from treespec.cli.early_requests import check_request
from treespec.cli.endings import print_ending
from treespec.cli.measure_endings import (
    end_acceptance,
    end_calibrate,
    end_certify,
    end_doctor,
    end_eval,
    end_skip_search,
    end_tau,
    end_tree,
)
from treespec.cli.options import build_command
from treespec.cli.terminal import print_remark, resumes, run_with_progress, show_notice, show_result
from treespec.draft.preflight import check_there
from treespec.errors import InputError
from treespec.eval.acceptance.config import (
    AcceptanceConfig,
    TauConfig,
    list_cases,
    list_sweeps,
    parse_schemes,
)
from treespec.eval.common import split_list
from treespec.eval.config import (
    CalibrateConfig,
    CertifyConfig,
    DoctorConfig,
    EvalConfig,
    SkipSearchConfig,
    TreeConfig,
    is_oracle,
    parse_drafters,
)
from treespec.files.atomic import check_folder, check_writable
from treespec.files.openai_client import check_server
from treespec.files.printable import to_one_line
from treespec.heads.registry import count_folder_levels
from treespec.options import join_or


@build_command(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions. The same command resumes a killed run."""
    # 1. Check the options before torch loads.
    from treespec.eval.ledger import LEDGER_FILE
    from treespec.eval.systems import list_systems

    check_folder(config.out)
    list_systems(config)
    check_questions(config.questions, split_list("categories", config.categories))
    if (Path(config.out) / LEDGER_FILE).exists():  # a finished evaluation needs no models
        show_notice(f"reading {config.out} …")
    else:
        drafters = [drafter.written for drafter in parse_drafters(config)]
        heads = [drafter for drafter in drafters if not is_oracle(drafter)]
        check_inputs_early(config, heads, chats=True)
        if config.assistant is not None:
            check_there(config.assistant, "assistant directory")

    # 2. Measure, and show the report; with several processes only the first one has it.
    from treespec.eval.benchmark import evaluate as run
    from treespec.eval.tables import build_eval_page

    with resumes(config.out):
        summary = run_with_progress(run, config)
    if summary is not None:
        for problem in summary["left_out"]:
            print_remark(f"left out: {problem}")
        page = build_eval_page(summary)
        show_result(page.report, page.header)
        print_ending(end_eval(config, summary["rows"]))


@build_command(CertifyConfig)
def certify(config: CertifyConfig) -> None:
    """Test whether a target, head, verifier and tree, or a server, are exact. Exit code 0: yes, 1: no."""
    # 1. Check what needs no weights.
    check_writable(config.out, "--out")
    check_questions(config.questions)
    for option, server in (("--endpoint", config.endpoint), ("--plain", config.plain)):
        if server is not None:
            check_server(option, server)
    begin_answers(config)
    check_request(config)
    from treespec.eval.certify.run import certify as run

    # 2. Test, and print each result and the verdict.
    certificate = run_with_progress(run, config)
    for test in certificate["tests"]:
        print_test(test)
    print_precision(certificate, config)
    left_out = certificate["not_applied"]
    if left_out:
        print(
            f"Left out on both sides of the model's own generation config: {', '.join(left_out)}."
        )
    verdict = format_verdict(certificate)
    print(verdict)
    print_ending(end_certify(config, certificate, verdict))
    if not certificate["passed"]:
        raise typer.Exit(1)


def print_test(test: dict[str, Any]) -> None:
    """Print the result of one test of a certificate, on greedy or on sampled answers."""
    if "different" in test:
        different = len(test["different"])
        result = f"{different} of {test['answers']} differ"
        if different and test["passed"]:
            result += ", by rounding alone"
    else:
        result = f"p-value {test['p_value']:.3g} of {test['samples']}"
    status = "FAILED"
    if test["passed"]:
        status = "passed"
    print(f"{status}  {test['test']}: {result}")
    worst = test.get("shown_by")
    if worst:
        sampling = f"temperature {worst['temperature']:g}, top-k {worst['top_k']}, top-p {worst['top_p']:g}"
        print(f"        most of all at {sampling}: {to_one_line(worst['answer'])[:100]}")


def print_precision(certificate: dict[str, Any], config: CertifyConfig) -> None:
    """Print how the target's precision affects the result."""
    dtype = certificate["environment"].get("dtype")
    if not config.endpoint:
        bits = "other rounding than"
        if certificate["equal_bits"]:
            bits = "the same bits as"
        print(f"In {dtype} a node of a tree has {bits} one token at a time.")
        return
    greedy = certificate["tests"][0]
    sampled = certificate["tests"][1:]
    if config.plain or greedy["passed"]:
        return
    if all(test["passed"] for test in sampled):
        print(f"The reference is in {dtype}: of a server in another precision give --dtype.")


def format_verdict(certificate: dict[str, Any]) -> str:
    """Format the verdict, with the smallest fault that the samples would have shown."""
    if not certificate["passed"]:
        return f"Fault found: {certificate['verifier']}."
    sampled = certificate["tests"][1:]
    unit = "tokens"
    if len(sampled) == 1:
        unit = "texts"
    return (
        f"No fault found: {certificate['verifier']}. {sampled[0]['samples']:,} {unit} would show shifts of more than "
        f"{sampled[0]['finds']:.1%} of the probability."
    )


@build_command(AcceptanceConfig)
def acceptance(config: AcceptanceConfig) -> None:
    """Measure the acceptance rates of verifiers on a head's drafts, and the optimum α*."""
    check_folder(config.out)
    check_text(config.text)
    check_questions(config.questions)
    for sweep in list_sweeps(config):
        list_cases(sweep)
        parse_schemes(sweep.verifier)
    if config.head and not config.given:
        check_inputs_early(config, [f"head:{config.head}"])
        deepest = count_folder_levels(Path(config.head).expanduser())
        if deepest is not None and config.step > deepest:
            raise InputError(
                f"--step is {config.step}, the head {config.head} drafts {deepest} tokens ahead"
            )
    from treespec.eval.acceptance.rates import accept
    from treespec.eval.acceptance.table import build_acceptance_page

    result = run_with_progress(accept, config)
    page = build_acceptance_page(result)
    show_result(page.report, page.header)
    print_ending(end_acceptance(config, result["sweeps"]))


@build_command(TauConfig)
def tau(config: TauConfig) -> None:
    """Measure the exact τ of verifiers and trees on the target's own answers, and the bound of their draws."""
    check_folder(config.out)
    check_text(config.text)
    check_questions(config.questions)
    _ = config.verifiers
    check_inputs_early(config, [drafter.written for drafter in config.drafters])
    from treespec.eval.acceptance.table import build_tau_page
    from treespec.eval.acceptance.tau import measure_tau

    with resumes(config.out):
        result = run_with_progress(measure_tau, config)
    page = build_tau_page(result)
    show_result(page.report, page.header)
    print_ending(end_tau(config, result["rows"]))


@build_command(CalibrateConfig)
def calibrate(config: CalibrateConfig) -> None:
    """Calibrate a head: acceptance rates for --tree auto, and draft temperature. Training does this too."""
    check_text(config.text)
    check_questions(config.questions)
    check_inputs_early(config, [f"head:{config.head}"])
    from treespec.eval.fit import calibrate_head

    file, coverage = run_with_progress(calibrate_head, config)
    if coverage is not None:
        print(f"The head drafts {config.draft_vocab} tokens, which are {coverage:.1%} of the text")
    print_ending(end_calibrate(config, file))


@build_command(TreeConfig)
def tree(config: TreeConfig) -> None:
    """Measure a head's accuracy by depth and rank, and write its best tree (--tree FILE.json)."""
    check_writable(config.out, "--out")
    check_text(config.text)
    check_questions(config.questions)
    check_inputs_early(config, [f"head:{config.head}"])
    from treespec.engine.stats import TAU_MEANING
    from treespec.eval.fit import make_tree
    from treespec.eval.report import EvalReport, Table

    best_tree, table, expected_tau = run_with_progress(make_tree, config)
    rows = []
    for depth, shares in enumerate(table.tolist(), start=1):
        row = {"Depth": str(depth)}
        for rank, share in enumerate(shares, start=1):
            row[str(rank)] = f"{share:.1%}"
        rows.append(row)
    title = "How often the head's guess of each rank is right, by depth"
    expectation = f"expected τ {expected_tau:.2f} ({TAU_MEANING})"
    summary = f"A tree of {best_tree.size} nodes, {best_tree.max_depth} deep, {expectation}."
    show_result(EvalReport([Table(title, ["Depth"], rows)], [summary]))
    print_ending(end_tree(config, expected_tau))


@build_command(SkipSearchConfig)
def skip_search(config: SkipSearchConfig) -> None:
    """Find the sublayers to skip when a target drafts for itself (--drafter self:FILE)."""
    check_writable(config.out, "--out")
    check_text(config.text)
    check_questions(config.questions)
    check_inputs_early(config)
    from treespec.eval.skip_search import search_skip_set

    skipped, prediction = run_with_progress(search_skip_set, config)
    print(
        f"Of {skipped.layers} layers {len(skipped.attention)} skip their attention, {len(skipped.mlp)} "
        f"their MLP. With --tree chain:{prediction.depth} that predicts "
        f"{prediction.acceptance_length:.2f} tokens per forward of the target, and "
        f"{prediction.speedup:.2f} times the speed of one token at a time"
    )
    print_ending(end_skip_search(config, prediction.speedup, prediction.depth))


@build_command(DoctorConfig)
def doctor(config: DoctorConfig) -> None:
    """Diagnose a head that drafts badly by trying to undo each common fault; or examine the C kernels."""
    if config.kernels:
        examine_kernels(config)
        return
    check_writable(config.out, "--out")
    check_text(config.text)
    check_text(config.data, "data")
    check_questions(config.questions)
    check_inputs_early(config, [f"head:{config.head}"])
    from treespec.eval.doctor import examine

    page = run_with_progress(examine, config)
    show_result(page.report, page.header)
    print_ending(end_doctor(config, page.report.verdict))


def examine_kernels(config: DoctorConfig) -> None:
    """Print whether the C kernels run, and which layers of the target they fuse."""
    if config.target:
        check_inputs_early(config, words=False)
    from treespec.eval.kernel_report import describe_machine
    from treespec.eval.report import EvalReport

    show_result(EvalReport([], run_with_progress(describe_machine, config)))


def rebuild_report(
    run: Annotated[
        Path,
        typer.Argument(
            help="the --out of eval, tau or acceptance, or the JSON file of certify or doctor"
        ),
    ],
    format: Annotated[
        str, typer.Option(help="what is printed: markdown, latex (booktabs) or csv")
    ] = "markdown",
) -> None:
    """Make the pages of a run again from its results, with a CSV and an SVG for each table and plot."""
    from treespec.eval.rebuild import PAGE_FORMATS, rebuild_pages

    if format not in PAGE_FORMATS:
        raise InputError(f"--format is {format!r}: give {join_or(PAGE_FORMATS)}")
    for file, page in rebuild_pages(run):
        print(PAGE_FORMATS[format](page), end="")
        print_remark(f"The page is {file.resolve()}; its tables and plots are beside it")
