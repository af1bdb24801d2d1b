"""`treespec certify`: tests that the output is the target's own. Exit code 0 or 1."""

import typer

from treespec.cli.early import begin_answers, check_questions
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice
from treespec.eval.config import CertifyConfig
from treespec.files.atomic import check_writable


@takes(CertifyConfig)
def certify(config: CertifyConfig) -> None:
    """Test whether a target, head, verifier and tree are exact. Exit code 0: yes, 1: no."""
    # 1. Check what needs no weights.
    check_writable(config.out, "--out")
    check_questions(config.questions)
    begin_answers(config)
    from pathlib import Path

    from treespec.cli.terminal import with_progress
    from treespec.eval.certify.run import certify as run
    from treespec.eval.certify.run import promised
    from treespec.text.strings import one_line

    # 2. Say what the tests can find.
    end_notice()
    can = promised(config)
    print(
        f"Greedy answers must be the same tokens. Each test of {config.tokens} sampled tokens "
        f"fails an exact verifier with probability {can['error']:.2g} or less;\n"
        f"with {can['power']:.0%} they find a shift of "
        f"{can['finds']:.3f} of the probability, or a correlation of "
        f"{can['finds_correlation']:.3f} along the text."
    )

    # 3. Test, and print each result.
    found = with_progress(lambda report: run(config, report))
    greedy, *laws = found["tests"]
    rounding = ", by rounding alone" if greedy["different"] and greedy["passed"] else ""
    print(
        f"{said(greedy)}  {greedy['test']}: {len(greedy['different'])} of {greedy['answers']} "
        f"differ{rounding}"
    )
    for answer in greedy["different"]:
        apart = f"logits {answer['margin']:.3g} apart, noise {answer['noise']:.3g}"
        print(f"        at token {answer['different_at']}: {apart}")
    for test in laws:
        print(f"{said(test)}  {test['test']}: p-value {test['p_value']:.3g} of {test['samples']}")
    bits = "the same bits as" if found["equal_bits"] else "other rounding than"
    print(f"In {found['environment']['dtype']} a node of a tree has {bits} one token at a time.")
    if found["not_applied"]:
        settings = ", ".join(f"{name}={value}" for name, value in found["not_applied"].items())
        print(
            "Left out on both sides: the model's own generation config would also apply "
            f"{one_line(settings)}."
        )
    verdict = f"NOT certified: {found['verifier']}."
    if found["passed"]:
        tokens = laws[0]
        verdict = (
            f"Certified: {found['verifier']}. At {tokens['samples']:,} tokens faults that shift less "
            f"than {tokens['finds']:.1%} of the probability may stay hidden."
        )
    print(f"{verdict} Report: {Path(config.out).resolve()}")
    if not found["passed"]:
        raise typer.Exit(1)


def said(test: dict) -> str:
    return "passed" if test["passed"] else "FAILED"
