"""The oracle row of an evaluation: the target's own answer as drafts, accepted whole at every temperature."""

import math

import pytest
from commands import complains, config_in, page_of, read_completions, run_command, treespec

from treespec.draft.lookup.oracle import Oracle
from treespec.eval.benchmark import evaluate
from treespec.eval.systems import list_systems


@pytest.fixture(scope="module")
def measured(home, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    options = {"drafter": f"oracle:3,suffix:tokens=0,eagle:{home}/head@2x2", "head": None, "verifier": "auto"}
    summary = evaluate(config_in(home, out, temperature="0,1", max_new_tokens=9, warm_up=0, **options))
    return out, summary


def test_every_draft_token_of_an_oracle_is_accepted(measured):
    """A chain of three brings four tokens a forward, until the answer ends."""
    out, summary = measured
    rows = [row for row in summary["rows"] if row["drafter"] == "oracle:3"]
    assert [(row["method"], row["temperature"]) for row in rows] == [("auto", 0.0), ("auto", 1.0)]
    for row in rows:
        for completion in read_completions(out)[row["name"]]:
            assert completion["cycles"] == [math.ceil(tokens / 4) for tokens in completion["new_tokens"]]
    others = [row for row in summary["rows"] if row["drafter"] and row not in rows]
    best = max(row["overall"]["acceptance_length"]["value"] for row in others)
    assert min(row["overall"]["acceptance_length"]["value"] for row in rows) > best
    assert rows[0]["same"] == rows[0]["turns"]


def test_the_report_says_how_to_read_an_oracle_and_never_recommends_it(measured):
    page = page_of(measured[0] / "report.md")
    assert "| oracle:3 " in page
    assert "Oracle: the target's own answer, made before the clock starts" in page
    assert "oracle" not in page.partition("## Verdict")[2].partition("## Run")[0]


def test_an_oracle_goes_only_with_verifiers_that_write_a_seeds_text_again(home, tmp_path, capsys):
    config = config_in(home, tmp_path, head=None, drafter="oracle,suffix", verifier="auto,topk,rrs")
    pairs = [(system.drafter, system.method) for system in list_systems(config) if system.drafter]
    assert pairs == [("oracle", "auto"), ("suffix", "auto"), ("suffix", "topk")]
    config = config_in(home, tmp_path, head=None, drafter="oracle,suffix", verifier="topk")
    assert ("oracle", "auto") in [(system.drafter, system.method) for system in list_systems(config)]
    with complains("oracle with topk: an oracle replays the text of a seed"):
        list_systems(config_in(home, tmp_path, head=None, drafter="oracle", verifier="topk"))


def test_other_commands_refuse_an_oracle_before_they_load(home, capsys):
    assert treespec(f"generate Hi --target {home}/target --drafter oracle:4") == 2
    assert "only" not in capsys.readouterr().out
    with complains("has no answer to replay"):
        Oracle(3).draft([1, 2])


def test_an_evaluation_of_an_oracle_alone_judges_no_drafter(home, tmp_path, capsys):
    options = {"target": f"{home}/target", "drafter": "oracle", "questions": f"{home}/questions.jsonl", "limit": 1}
    assert run_command(options | {"out": tmp_path, "max_new_tokens": 4, "warm_up": 0, "dtype": "float32"}) == 0
    assert "Not judged" in capsys.readouterr().err
