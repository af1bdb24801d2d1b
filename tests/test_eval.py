"""An evaluation measures what it says: same answers, honest totals, nothing lost and nothing twice."""

import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import typer
from evaluating import FILES, QUESTIONS, TURNS, answered, config_in, page_of, save_models, tokens_of
from typer.testing import CliRunner

from treespec.api.spec import Spec
from treespec.cli.evaluate import evaluate as command
from treespec.decoding.stats import TAU
from treespec.errors import InputError
from treespec.eval.mtbench.run import evaluate
from treespec.eval.mtbench.summary import summarise
from treespec.files.atomic import read_json, write_json
from treespec.model.target import Target


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """(OUT, summary, steps) of a whole evaluation: the baseline and two verifiers, greedy, float32."""
    out, steps = tmp_path_factory.mktemp("finished"), []
    summary = evaluate(config_in(home, out), steps.append)
    return out, summary, steps


def test_every_greedy_answer_is_the_baselines(finished):
    out, summary, _ = finished
    by_name = answered(out)
    assert by_name.keys() == {"target-baseline-t0", "target-topk-t0", "target-rrs-wo-t0"}
    for lines in by_name.values():
        assert [line.question_id for line in lines] == [1, "b", 3]
        for line, reference in zip(lines, by_name["target-baseline-t0"], strict=True):
            assert line.extra["token_ids"] == reference.extra["token_ids"]
            assert line.turns == reference.turns
    same = [row["same_as_baseline"] for row in summary["configurations"]]
    assert same == [None, {"same": TURNS, "answers": TURNS}, {"same": TURNS, "answers": TURNS}]


def test_the_second_turn_answers_the_configurations_own_first(home, finished):
    spec = Spec(Target.load(str(home / "target")), None)
    (first, second), own = QUESTIONS[0]["turns"], answered(finished[0])["target-topk-t0"][0]
    messages = [{"role": "user", "content": first}]
    assert spec.generate(messages, max_new_tokens=12).token_ids == own.extra["token_ids"][0]
    messages += [{"role": "assistant", "content": own.turns[0]}, {"role": "user", "content": second}]
    assert spec.generate(messages, max_new_tokens=12).token_ids == own.extra["token_ids"][1]


def test_answer_lines_add_up(finished):
    for lines in answered(finished[0]).values():
        for line in lines:
            assert line.new_tokens == [len(ids) for ids in line.extra["token_ids"]]
            assert sum(line.accept_lengths) == sum(line.new_tokens)
            assert len(line.accept_lengths) == sum(line.decoding_steps)
            assert line.extra["accepted"] == [
                sum(length > depth for length in line.accept_lengths)
                for depth in range(1, len(line.extra["drafted"]) + 1)
            ]
            assert sum(line.wall_time) >= line.extra["seconds"]["total"] > 0
            assert len(line.extra["seeds"]) == len(line.turns) == len(line.wall_time)


def test_the_summary_is_what_the_answer_lines_say(finished):
    out, summary, _ = finished
    lines = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in (out / "answers").glob("*.jsonl")
    }
    assert read_json(out / "summary.json", "") == summary

    def total(chosen, name):
        return sum(sum(line["choices"][0][name]) for line in chosen)

    for row in summary["configurations"]:
        for category in ("overall", "math", "writing"):
            kept = {"overall": {1, "b", 3}, "math": {"b", 3}, "writing": {1}}[category]
            mine, base = (
                [line for line in lines[name] if line["question_id"] in kept]
                for name in (row["model_id"], "target-baseline-t0")
            )
            got = row["overall"] if category == "overall" else row["categories"][category]
            speeds = [total(some, "new_tokens") / total(some, "wall_time") for some in (mine, base)]
            assert got["questions"] == len(kept)
            assert got["tokens"] == total(mine, "new_tokens")
            cycles = total(mine, "decoding_steps")
            assert got["acceptance_length"]["value"] == pytest.approx(got["tokens"] / cycles)
            assert got["tokens_per_second"]["value"] == pytest.approx(speeds[0])
            lengths = [n for line in mine for n in line["choices"][0]["accept_lengths"]]
            for depth, alpha in enumerate(got["acceptance_rate_by_depth"], 1):
                above = sum(length >= depth for length in lengths)
                here = sum(length > depth for length in lengths)
                assert alpha["value"] == (pytest.approx(here / above) if above else None)
            assert sum(got["cycle_share"].values()) == pytest.approx(1)
            spent = sum(got["cycle_ms"].values()) / 1000 * cycles + got["prefill_seconds"]
            assert spent == pytest.approx(total(mine, "wall_time")) == pytest.approx(got["seconds"])
            assert min(got["cycle_ms"].values()) >= 0
            if row["verifier"] == "baseline":
                assert got["speedup"] is None
                continue
            assert got["speedup"]["value"] == pytest.approx(speeds[0] / speeds[1])
            ratios = [
                (total([a], "new_tokens") / total([a], "wall_time"))
                / (total([b], "new_tokens") / total([b], "wall_time"))
                for a, b in zip(mine, base, strict=True)
            ]
            assert got["speedup_by_question"]["value"] == pytest.approx(np.mean(ratios))
    assert summary["few_questions"] == ["overall", "writing", "math"]
    assert len(summary["left_out"]) == 1
    assert ":4" in summary["left_out"][0]


def test_the_markdown_has_every_configuration_and_category(finished):
    out, summary, _ = finished
    page = (out / "summary.md").read_text()
    table = next(part for part in page.split("## ") if part.startswith("By category"))
    page = page_of(out / "summary.md")
    assert re.findall(r"\w+", table.splitlines()[2]) == ["Verifier", "T", "writing", "math", "overall"]
    for row in summary["configurations"][1:]:
        line = next(line for line in table.splitlines() if line.startswith(f"| {row['verifier']} "))
        cells = re.findall(r"(\d+\.\d\d) \((\d+\.\d\d)\)", line)
        groups = [*row["categories"].values(), row["overall"]]
        expected = [(g["acceptance_length"]["value"], g["speedup"]["value"]) for g in groups]
        assert np.allclose(np.array(cells, dtype=float), expected, atol=0.005)
    assert "Fewer than 10 questions" in page
    assert "Left out, 1: questions.jsonl:4" in page
    assert re.search(rf"of {3 * TURNS} answers were ended by max_new_tokens", page)


def test_questions_answered_together_have_the_same_answers(home, finished, tmp_path):
    """Three questions two at a time, killed amid a group; the second turn is asked of two texts, then of one."""
    config = config_in(home, tmp_path / "out", batch=2)
    with pytest.raises(Killed):
        evaluate(config, killed_after(3))
    evaluate(config)
    assert tokens_of(tmp_path / "out") == tokens_of(finished[0])
    for lines in answered(tmp_path / "out").values():
        for line in lines:
            assert sum(line.wall_time) >= line.extra["seconds"]["total"] > 0
    assert "2 questions were answered together" in page_of(tmp_path / "out" / "summary.md")


class Killed(Exception):
    pass


def killed_after(count):
    def report(step):
        if step.done == count:
            raise Killed

    return report


def test_a_killed_run_goes_on_without_answering_twice(home, finished, tmp_path):
    config = config_in(home, tmp_path / "out")
    for count in (1, 5):
        with pytest.raises(Killed):
            evaluate(config, killed_after(count))
        assert sum(map(len, answered(tmp_path / "out").values())) == count
    file = tmp_path / "out" / "answers" / "target-topk-t0.jsonl"
    file.write_text(file.read_text() + '{"question_id": 3, "cat')  # killed while writing
    summary = evaluate(config)
    counts = Counter((name, line.question_id) for name, lines in answered(tmp_path / "out").items() for line in lines)
    assert set(counts.values()) == {1}
    assert tokens_of(tmp_path / "out") == tokens_of(finished[0])
    assert [row["overall"]["tokens"] for row in summary["configurations"]] == [
        row["overall"]["tokens"] for row in finished[1]["configurations"]
    ]


def test_a_finished_run_is_summarised_again_without_its_models(home, finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    record = read_json(out / "config.json", "")
    record["config"] |= {"target": "/gone/target"}
    write_json(out / "config.json", record)
    again = evaluate(config_in(home, out, target="/gone/target", resamples=20))
    assert again["config"]["resamples"] == 20
    for row, before in zip(again["configurations"], finished[1]["configurations"], strict=True):
        for name in ("acceptance_length", "tokens_per_second"):
            assert row["overall"][name]["value"] == before["overall"][name]["value"]


@pytest.mark.parametrize(
    "change", [{"temperature": "1"}, {"max_new_tokens": 13}, {"verifier": "topk"}, {"limit": 2}, {"seed": 1}]
)
def test_another_evaluation_in_the_same_folder_is_refused(home, finished, change):
    before = tokens_of(finished[0])
    with pytest.raises(InputError, match=f"another evaluation .*{next(iter(change))} was"):
        evaluate(config_in(home, finished[0], **change))
    assert tokens_of(finished[0]) == before


def test_changed_questions_and_machines_are_refused(home, finished, tmp_path):
    for file, changed, reason in (
        ("questions", "0" * 64, "questions themselves"),
        ("environment", {"device": "abacus"}, "abacus"),
    ):
        out = tmp_path / file
        out.mkdir()
        write_json(out / "config.json", read_json(finished[0] / "config.json", "") | {file: changed})
        with pytest.raises(InputError, match=reason):
            evaluate(config_in(home, out))
        assert not (out / "summary.json").exists()


def test_one_row_of_steps_for_a_person_to_watch(finished):
    _, _, steps = finished
    *steps, recording = steps
    texts = [step.text for step in steps]
    assert [step.done for step in steps][-9:] == list(range(1, 10))
    assert "report.html" in recording.text
    assert {step.total for step in steps} == {9}
    assert sum(text.startswith("warm-up") for text in texts) == 3
    assert all("tokens/s" in text for text in texts[-9:])
    assert [f"τ ({TAU})" in re.sub(r"τ [\d.]+ ", "τ ", text) for text in texts[-9:]] == [True] + [False] * 8


def test_the_verdict_is_what_the_rows_say(finished):
    out, summary, _ = finished
    _, *pairs = summary["configurations"]
    fastest = max(pairs, key=lambda row: row["overall"]["tokens_per_second"]["value"])
    for row in pairs:
        speeds = [one["overall"]["tokens_per_second"]["value"] for one in (row, fastest)]
        ratio = row["of_fastest"] and row["of_fastest"]["value"]
        assert ratio == (None if row is fastest else pytest.approx(speeds[0] / speeds[1]))
    assert "too few to say what is faster" in page_of(out / "summary.md").partition("## Verdict")[2]


def test_the_baseline_is_asked_twice_for_the_noise_of_the_clock(home, tmp_path):
    """Of 41 questions 10 are asked again, spread over the run; with fewer than ten none is."""
    lines = [{"question_id": i, "category": "c", "turns": [f"Count {i}."]} for i in range(41)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = config_in(home, tmp_path / "out", questions=str(tmp_path / "q.jsonl"), verifier="topk", max_new_tokens=2)
    summary = evaluate(config)
    by_name = answered(tmp_path / "out")
    assert {name: len(own) for name, own in by_name.items()} == {
        "target-baseline-t0": 41,
        "target-baseline-t0-again": 10,
        "target-topk-t0": 41,
    }
    (again,) = summary["again"]
    assert again["questions"] == 10
    assert again["speedup"]["low"] <= again["speedup"]["value"] <= again["speedup"]["high"]
    assert len(summary["configurations"]) == 2
    page = page_of(tmp_path / "out" / "summary.md")
    assert "| baseline again |" in page
    assert "Baseline again: it answered 10 of the questions twice" in page
    assert "too few" not in page
    assert summarise(tmp_path / "out", 50)["again"] == [again]


def test_the_command_prints_lines_and_the_table_where_there_is_no_terminal(home, finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    app = typer.Typer()
    app.command()(command)
    options = {"--out": out, "--verifier": "topk,rrs-wo", "--max-new-tokens": 12, "--warm-up": 1}
    options |= {"--dtype": "float32", "--resamples": 50} | {f"--{name}": home / file for name, file in FILES.items()}
    result = CliRunner().invoke(app, [str(x) for pair in options.items() for x in pair], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == (out / "summary.md").read_text()
    assert "left out: questions.jsonl:4" in result.stderr
    assert "Answers and summary are in" in result.stderr


def test_a_folder_without_answers_says_so(finished, tmp_path):
    (tmp_path / "config.json").write_text((finished[0] / "config.json").read_text())
    with pytest.raises(InputError, match="no question is answered"):
        summarise(tmp_path)
