"""An evaluation measures what it says: same completions, honest totals, nothing lost and nothing twice."""

import csv
import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from commands import (
    QUESTIONS,
    config_in,
    page_of,
    read_completions,
    tokens_of,
    write_counting,
    write_questions,
)

from treespec.api.spec import Spec
from treespec.engine.stats import TAU_MEANING
from treespec.eval.benchmark import evaluate
from treespec.eval.figures import summarize_ledger
from treespec.eval.ledger import Ledger
from treespec.eval.questions import Question
from treespec.files.atomic import read_json
from treespec.model.target import Target

TURNS = sum(len(question["turns"]) for question in QUESTIONS)


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """(OUT, summary, steps) of a whole evaluation: the baseline and two verifiers, greedy, float32."""
    out = tmp_path_factory.mktemp("finished")
    steps = []
    summary = evaluate(config_in(home, out), steps.append)
    return out, summary, steps


def test_every_greedy_completion_is_the_baselines_and_entries_add_up(finished):
    out, summary, _ = finished
    by_name = read_completions(out)
    assert by_name.keys() == {"target-baseline-t0", "target-topk-t0", "target-rrs-wo-t0"}
    for own in by_name.values():
        assert [one["question_id"] for one in own] == [1, "b", 3]
        for one, reference in zip(own, by_name["target-baseline-t0"], strict=True):
            assert (one["token_ids"], one["turns"]) == (reference["token_ids"], reference["turns"])
            lengths = one["accept_lengths"]
            depths = range(1, len(one["drafted"]) + 1)
            assert one["new_tokens"] == [len(ids) for ids in one["token_ids"]]
            assert sum(lengths) == sum(one["new_tokens"])
            assert len(lengths) == sum(one["cycles"])
            assert one["accepted"] == [sum(length > depth for length in lengths) for depth in depths]
            assert sum(one["wall"]) >= one["seconds"]["total"] > 0
            assert len(one["seeds"]) == len(one["turns"]) == len(one["wall"])
    assert [(row["same"], row["turns"]) for row in summary["rows"]] == [(None, TURNS), (TURNS, TURNS), (TURNS, TURNS)]


def test_the_second_turn_follows_the_contestants_own_first(home, finished):
    spec = Spec(Target.load(f"{home}/target"), None)
    (first, second) = QUESTIONS[0]["turns"]
    own = read_completions(finished[0])["target-topk-t0"][0]
    messages = [{"role": "user", "content": first}]
    assert spec.generate(messages, max_new_tokens=12).token_ids == own["token_ids"][0]
    messages += [{"role": "assistant", "content": own["turns"][0]}, {"role": "user", "content": second}]
    assert spec.generate(messages, max_new_tokens=12).token_ids == own["token_ids"][1]


def test_the_figures_are_what_the_entries_say(finished):
    """Of all questions and of each category; test_figures.py has the figures themselves."""
    out, summary, _ = finished
    assert read_json(out / "report.json", "") == summary == summarize_ledger(Ledger(out))

    for row, (category, kept) in product(summary["rows"], {"overall": {1, "b", 3}, "math": {"b", 3}}.items()):
        mine = [one for one in read_completions(out)[row["name"]] if one["question_id"] in kept]
        got = row["overall"] if category == "overall" else row["categories"][category]
        tokens, cycles, wall = (sum(sum(one[name]) for one in mine) for name in ("new_tokens", "cycles", "wall"))
        assert (got["questions"], got["tokens"]) == (len(kept), tokens)
        assert got["acceptance_length"]["value"] == pytest.approx(tokens / cycles)
        lengths = np.array([length for one in mine for length in one["accept_lengths"]])
        for depth, alpha in enumerate(got["acceptance_rate_by_depth"], 1):
            above = (lengths >= depth).sum()
            assert alpha["value"] == (pytest.approx((lengths > depth).sum() / above) if above else None)
        spent = sum(got["cycle_ms"].values()) / 1000 * cycles + got["prefill_seconds"]
        assert spent == pytest.approx(wall) == pytest.approx(got["seconds"])
    assert summary["few_questions"] == ["overall", "writing", "math"]
    assert ":4" in str(summary["left_out"])


def test_the_report_has_every_contestant_and_category(finished):
    out, summary, _ = finished
    table = next(part for part in (out / "report.md").read_text().split("## ") if part.startswith("By category"))
    assert re.findall(r"\w+", table.splitlines()[2]) == ["Method", "T", "writing", "math", "overall"]
    for row in summary["rows"][1:]:
        line = next(line for line in table.splitlines() if line.startswith(f"| {row['method']} "))
        cells = re.findall(r"(\d+\.\d\d) \((\d+\.\d\d)\)", line)
        groups = [*row["categories"].values(), row["overall"]]
        expected = [(g["acceptance_length"]["value"], g["speedup"]["value"]) for g in groups]
        assert np.allclose(np.array(cells, dtype=float), expected, atol=0.005)
    page = page_of(out / "report.md")
    assert "Fewer than 10 questions" in page
    assert "Left out, 1: questions.jsonl:4" in page
    assert re.search(rf"of {3 * TURNS} answers reached max_new_tokens", page)
    assert "too few to say what is faster" in page.partition("## Verdict")[2]


def test_the_files_of_completions_are_what_fastchat_and_spec_bench_read(finished):
    own = read_completions(finished[0])["target-topk-t0"]
    lines = (finished[0] / "answers" / "target-topk-t0.jsonl").read_text("ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    # fastchat.llm_judge.common.load_model_answers, then run_judge_single with both turns
    assert {entry["question_id"]: entry for entry in entries}["b"]["choices"][0]["turns"] == own[1]["turns"]
    assert {"answer_id", "model_id", "tstamp"} <= entries[0].keys()
    # Spec-Bench's evaluation/speed.py
    choices = [entry["choices"][0] for entry in entries if entry["category"] == "math"]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    assert speeds == [sum(one["new_tokens"]) / sum(one["wall"]) for one in own[1:]]
    assert all(len(choice["accept_lengths"]) == sum(choice["decoding_steps"]) for choice in choices)
    # EAGLE's `idxs`: a turn's last cycle, from 0
    assert all(choice["idxs"] == [steps - 1 for steps in choice["decoding_steps"]] for choice in choices)


def test_the_figures_are_also_a_csv_with_a_row_for_each_category(finished):
    out, summary, _ = finished
    rows = list(csv.DictReader((out / "report.csv").open(newline="")))
    assert [(row["name"], row["group"]) for row in rows] == [
        (row["name"], group) for row in summary["rows"] for group in ("overall", "writing", "math")
    ]
    for got, expected in zip(rows[::3], summary["rows"], strict=True):
        overall = expected["overall"]
        assert float(got["tokens_per_second"]) == overall["tokens_per_second"]["value"]
        assert float(got["mean_rate_high"]) == overall["mean_rate"]["high"]
        assert float(got["cycle_ms_target"]) == overall["cycle_ms"]["target"]
        assert (got["speedup"] == "") == (overall["speedup"] is None) == (got["drafter"] == "")


def test_spec_benchs_speedup_is_the_ratio_of_mean_rates(finished):
    """As its evaluation/speed.py computes it from the answers."""
    out, summary, _ = finished
    means = []
    for row in summary["rows"]:
        lines = map(json.loads, (out / "answers" / f"{row['name']}.jsonl").read_text().splitlines())
        choices = [line["choices"][0] for line in lines]
        means.append(np.mean([sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]))
    for row, mean in zip(summary["rows"][1:], means[1:], strict=True):
        assert row["overall"]["mean_rate"]["value"] == pytest.approx(mean)
        assert row["overall"]["mean_rate_speedup"]["value"] == pytest.approx(mean / means[0])
    assert "speedup of mean rates" in (out / "report.md").read_text()


def test_one_row_of_steps_for_a_person_to_watch(finished):
    steps = finished[2]
    texts = [step.text for step in steps]
    assert [step.done for step in steps][-9:] == list(range(1, 10))
    assert {step.total for step in steps} == {9}
    assert sum(text.startswith("warm-up") for text in texts) == 3
    assert [f"τ ({TAU_MEANING})" in re.sub(r"τ [\d.]+ ", "τ ", text) for text in texts[-9:]] == [True] + [False] * 8


def test_the_baseline_is_asked_twice_for_the_noise_of_the_clock(home, tmp_path):
    """Of 41 questions 10 are asked again, spread over the run; with fewer than ten none is."""
    questions = write_counting(tmp_path / "q.jsonl", 41)
    summary = evaluate(config_in(home, tmp_path, questions=questions, verifier="topk", max_new_tokens=2))
    assert {name: len(own) for name, own in read_completions(tmp_path).items()} == {
        "target-baseline-t0": 41,
        "target-baseline-t0-again": 10,
        "target-topk-t0": 41,
    }
    (again,) = summary["again"]
    assert again["questions"] == 10
    assert again["speedup"]["low"] <= again["speedup"]["value"] <= again["speedup"]["high"]
    page = page_of(tmp_path / "report.md")
    assert "| A/A control |" in page
    assert "A/A control: the baseline answered 10 of the questions twice" in page
    assert "too few" not in page


def test_sampled_completions_repeat_with_the_seed_and_differ_by_turn_and_contestant(home, tmp_path):
    config = config_in(home, tmp_path / "a", temperature="1", max_new_tokens=6, verifier="rrs-wo,rrs", warm_up=0)
    for out in ("a", "b"):
        evaluate(replace(config, out=f"{tmp_path}/{out}"))
    by_name = read_completions(tmp_path / "a")
    assert tokens_of(tmp_path / "a") == tokens_of(tmp_path / "b")
    assert len({seed for own in by_name.values() for one in own for seed in one["seeds"]}) == 3 * TURNS
    spec = Spec(Target.load(str(home / "target")), None)
    prompt = [{"role": "user", "content": QUESTIONS[0]["turns"][0]}]
    own = by_name["target-baseline-t1"][0]
    again = spec.generate(prompt, temperature=1.0, max_new_tokens=6, seed=own["seeds"][0])
    assert again.token_ids == own["token_ids"][0]


def test_batches_of_any_size_have_equal_tokens_and_their_own_rows(home, tmp_path):
    """Also where the questions are no multiple of a batch."""
    config = config_in(home, tmp_path, verifier="topk,rrs@2x2", temperature="0,1", max_new_tokens=6, batch="2,1")
    rows = evaluate(config)["rows"]
    assert [row["batch"] for row in rows] == [1, 1, 1, 2, 2, 2] * 2
    by_batch = {1: {}, 2: {}}
    for (name, question), tokens in tokens_of(tmp_path).items():
        by_batch[int(name[-1])][name[:-3], question] = tokens
    assert by_batch[1] == by_batch[2]
    assert "the next one takes the place of one that has ended" in page_of(tmp_path / "report.md")


def test_completions_that_the_context_ends_are_counted(home, tmp_path):
    summary = evaluate(config_in(home, tmp_path, max_new_tokens=1000, verifier="topk", temperature="1", warm_up=0))
    completions = read_completions(tmp_path)
    for row in summary["rows"]:
        ends = []
        for one in completions[row["name"]]:
            ends += one["ended"]
            for ids, prompt, end in zip(one["token_ids"], one["prompt_tokens"], one["ended"], strict=True):
                assert end == ("model" if 2 in ids[-1:] else "context")
                assert end == "model" or len(ids) == max(256 - prompt, 0)
        assert row["ended"]["context"] == ends.count("context")
        assert sum(row["ended"].values()) == len(ends) == TURNS
    assert sum(row["ended"]["context"] for row in summary["rows"]) > 0
    assert "reached the target's context" in page_of(tmp_path / "report.md")


def test_a_process_that_begins_after_another_has_its_own_head(home, tmp_path):
    out = tmp_path / "out"
    other = tmp_path / "out" / "process-1" / "ledger.jsonl"
    config = config_in(home, out, verifier="topk", max_new_tokens=4, warm_up=0)
    first = evaluate(config)["rows"]
    other.parent.mkdir()
    other.write_text((out / "ledger.jsonl").read_text().partition("\n")[0] + "\n")
    (out / "ledger.jsonl").unlink()
    assert [row["overall"]["acceptance_length"] for row in evaluate(config)["rows"]] == [
        row["overall"]["acceptance_length"] for row in first
    ]


RIGHT = (
    *("18", "$18", "18.00", "So 20 - 2 = 18.", "The final answer is $18.", "#### 18", "3, 18", "it is **18**", "20-18"),
    *[("1,234,567", "about 1234567.0"), ("-5", "It falls to -5 degrees."), ("-5", "It costs -$5.")],
)
WRONG = ("", "eighteen", "-18", "1,8", "18 of 20", "180", "1.8", "18.5", "x = -18")


@pytest.mark.parametrize("said, right", [(said, True) for said in RIGHT] + [(said, False) for said in WRONG])
def test_an_answer_is_right_if_its_last_number_is(said, right):
    number, text = ("18", said) if isinstance(said, str) else said
    assert Question(1, "sums", ("?",), number=number).is_right(text) is right
    assert Question(1, "sums", ("?",)).is_right(text) is None


def test_right_answers_are_counted_and_the_same_at_temperature_0(home, tmp_path):
    lines = [{"question_id": i, "category": "sums", "turns": [f"Question {i}?"], "number": str(i)} for i in range(3)]
    lines.append({"question_id": 5, "category": "songs", "turns": ["Sing."]})
    options = {"verifier": "topk", "max_new_tokens": 6, "warm_up": 0}
    questions = write_questions(tmp_path / "q.jsonl", lines)
    baseline, pair = evaluate(config_in(home, tmp_path / "out", questions=questions, **options))["rows"]
    for row in (baseline, pair):
        verdicts = [one["right"] for one in read_completions(tmp_path / "out")[row["name"]]]
        assert verdicts[3] is None
        assert (row["right"]["answers"], row["right"]["right"]) == (3, sum(verdicts[:3]))
    assert baseline["right"]["same"] is None
    assert pair["right"]["same"] == 3
    assert re.search(rf"\| {pair['right']['right']} of 3 ", page_of(tmp_path / "out" / "report.md"))

    options |= {"questions": questions, "categories": "songs", "limit": 2}
    summary = evaluate(config_in(home, tmp_path / "songs", **options))
    assert list(summary["rows"][0]["categories"]) == ["songs"]
    assert summary["rows"][0]["right"] is None
    assert "Right answers" not in (tmp_path / "songs" / "report.md").read_text()
