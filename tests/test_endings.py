"""The last three lines of a command: what it wrote, whether that is good, the next command."""

import shlex
from pathlib import Path

import pytest

from treespec.cli import endings, measure_endings
from treespec.cli.chat import ChatConfig
from treespec.cli.endings import ClosingLines, end_answers, explain_no_gain, print_ending
from treespec.cli.side_by_side import PLAIN_TITLE, explain_wide_trees
from treespec.engine.stats import Stats
from treespec.eval.acceptance.config import AcceptanceConfig, TauConfig
from treespec.eval.config import CertifyConfig, DoctorConfig, EvalConfig, SkipSearchConfig, TreeConfig
from treespec.train import verdict

GUIDE = (Path(__file__).parents[1] / "docs" / "guide.md").read_text(encoding="utf-8")
MODELS = {"target": "org/model", "head": "heads/mine"}


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def eval_row(speedup):
    overall = {"speedup": speedup}
    return {"drafter": "head:heads/mine", "method": "auto", "tree": None, "temperature": 0.0, "overall": overall}


def certificate(passed, finds):
    tests = [{"test": "greedy"}, {"samples": 100, "finds": finds}]
    return {"passed": passed, "tests": tests, "verifier": "auto"}


def rate_row(method, rate, gap):
    return {"method": method, "rate": figure(rate), "gap": figure(gap)}


TAU_ROW = {"drafter": "head:mine", "verifier": "rrs-wo", "tree": "2x4", "temperature": 0.6, "tau": figure(2.0)}
EVAL = EvalConfig(**MODELS, out="runs/eval")
CERTIFY = CertifyConfig(**MODELS)
ACCEPTANCE = AcceptanceConfig(**MODELS, out="runs/rates")
TREE = TreeConfig(**MODELS, out="tree.json")
SKIP = SkipSearchConfig(target="org/model", out="skip.json")
DOCTOR = DoctorConfig(**MODELS)
CHAT = ChatConfig(**MODELS)
ENDINGS = {  # ending -> (whether it is good, its next command)
    "eval, faster": (lambda: measure_endings.end_eval(EVAL, [eval_row(figure(1.5, 1.4, 1.6))]), True, "certify"),
    "eval, unsure": (lambda: measure_endings.end_eval(EVAL, [eval_row(figure(1.1, 0.9, 1.3))]), False, "doctor"),
    "certify": (lambda: measure_endings.end_certify(CERTIFY, certificate(True, 0.03), "fine"), True, "serve"),
    "few tokens": (lambda: measure_endings.end_certify(CERTIFY, certificate(True, 0.3), "fine"), False, "certify"),
    "a fault": (lambda: measure_endings.end_certify(CERTIFY, certificate(False, 0.03), "bad"), False, "certify"),
    "rates": (lambda: measure_endings.end_acceptance(ACCEPTANCE, [[rate_row("rrs", 0.8, 0.004)]]), True, "tau"),
    "far rates": (lambda: measure_endings.end_acceptance(ACCEPTANCE, [[rate_row("rrs", 0.5, 0.2)]]), False, "tau"),
    "tree": (lambda: measure_endings.end_tree(TREE, 1.9), True, "eval"),
    "skip-search": (lambda: measure_endings.end_skip_search(SKIP, 0.8, 4), False, "eval"),
    "healthy head": (lambda: measure_endings.end_doctor(DOCTOR, ["No usual fault shows."]), True, "eval"),
    "young head": (lambda: measure_endings.end_doctor(DOCTOR, ["Little trained: 10 %"]), False, "train"),
    "flat head": (lambda: measure_endings.end_doctor(DOCTOR, ["Flat: 5 %"]), False, "calibrate"),
    "chat": (lambda: end_answers(CHAT, "300 tokens", 300, 100), True, "eval"),
    "poor chat": (lambda: end_answers(CHAT, "300 tokens", 300, 290), False, "doctor"),
}


def read_next(lines):
    """The words of the next command, without its program."""
    program, *words = shlex.split(lines.next_command)
    assert program == "treespec"
    return words


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_an_ending_judges_and_names_the_next_command(ending):
    end, is_good, command = ending
    lines = end()
    assert lines.verdict.startswith("Good: " if is_good else "Not good: ")
    words = read_next(lines)
    assert words[0] == command
    assert words[words.index("--target") + 1] == "org/model"


def test_the_next_command_of_tau_repeats_its_best_pair():
    config = TauConfig(**MODELS, out="runs/tau")
    words = read_next(measure_endings.end_tau(config, [TAU_ROW | {"drafter": config.drafters[0].short}]))
    assert words[words.index("--verifier") + 1] == "rrs-wo@2x4"
    assert words[words.index("--drafter") + 1] == "head:heads/mine"


def test_the_target_demo_needs_no_further_names():
    demo = end_answers(ChatConfig(), "300 tokens", 300, 100)
    assert demo.next_command == "treespec eval --target demo --out runs/eval"


def test_a_few_tokens_are_not_judged():
    assert end_answers(CHAT, "4 tokens", 4, 4).verdict.startswith("Not judged")


def test_an_ending_is_three_lines_on_standard_error(capsys):
    print_ending(ClosingLines("a file", "Good: so", "treespec chat"))
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.splitlines() == ["a file", "Good: so", "Next: treespec chat"]


def test_the_guide_states_every_threshold():
    for stated in (
        f"{endings.GOOD_TRAINING_TOKENS:,} tokens",
        f"τ of {endings.GOOD_TAU}, in tokens per forward of answers; below {endings.MIN_TAU} drafts do not pay",
        f"{verdict.GOOD_PREDICTED_CHAIN} tokens per step predicted; below {verdict.MIN_PREDICTED_CHAIN} the head",
        f"{100 * endings.GOOD_FIRST_DRAFTS:.0f} % of the first drafts right",
        f"at most {endings.GOOD_GAP_POINTS:g} point below α*",
        f"shifts above {100 * endings.GOOD_SHIFT:g} % would show",
    ):
        assert stated in GUIDE


def test_a_head_that_never_pays_is_told_after_enough_tokens():
    undrafted = Stats(new_tokens=200, accepted=[0] * 200, undrafted=195)
    assert "98% of the forwards draft nothing" in explain_no_gain(undrafted)
    assert "τ 1.05 is below 1.1" in explain_no_gain(Stats(new_tokens=210, accepted=[0] * 200))
    assert not explain_no_gain(Stats(new_tokens=300, accepted=[1] * 150))
    assert not explain_no_gain(Stats(new_tokens=20, accepted=[0] * 20, undrafted=20))


def test_a_slow_wide_tree_is_explained_by_its_cost():
    plain = Stats(new_tokens=100, accepted=[0] * 100)
    plain.seconds["total"] = 1.0
    wide = Stats(new_tokens=100, accepted=[1] * 50, drafted=[250, 1000])
    wide.seconds["total"] = 2.0
    said = " ".join(explain_wide_trees({PLAIN_TITLE: plain, "traversal": wide}).split())
    assert "traversal drafts 25 tokens a cycle" in said
    assert "4.00 tokens' time" in said
    assert "could be 2.00 times as fast" in said
    wide.seconds["total"] = 0.5
    assert explain_wide_trees({PLAIN_TITLE: plain, "traversal": wide}) == ""
