"""An evaluation measures what it says: same answers, honest totals, nothing lost and nothing twice."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import transformers as hf
import typer
from models import GROUPED, random_head, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from treespec.cli.evaluate import evaluate as command
from treespec.errors import InputError
from treespec.eval import answers
from treespec.eval.config import EvalConfig, configurations
from treespec.eval.run import evaluate, seed_of
from treespec.eval.summary import summarise
from treespec.heads.checkpoint import save_head
from treespec.spec import Spec
from treespec.target import Target

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Sing of the sea.", "Shorter."]},
    {"question_id": "b", "category": "math", "turns": ["What is 6 times 7?", "And 7 times 6?"]},
    {"question_id": 3, "category": "math", "turns": ["Count."]},
]
TURNS = sum(len(question["turns"]) for question in QUESTIONS)
SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target with a byte-level tokenizer and a chat template, a head for it, and questions."""
    folder = tmp_path_factory.mktemp("eval")
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    size = {"vocab_size": len(symbols), "max_position_embeddings": 256}
    model = random_model(hf.LlamaConfig(**GROUPED | size))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    save_head(random_head(Target(model)), folder / "head")
    lines = [json.dumps(question) for question in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join([*lines, "not a question"]) + "\n")
    return folder


def config_in(home, out, **changes):
    paths = {name: str(home / file) for name, file in FILES.items()}
    options = {"verifier": "topk,rrs-wo", "max_new_tokens": 12, "warm_up": 1, "dtype": "float32"}
    return EvalConfig(out=str(out), **paths | options | {"resamples": 50} | changes)


FILES = {"target": "target", "head": "head", "questions": "questions.jsonl"}


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """(OUT, summary, steps) of a whole evaluation: the baseline and two verifiers, greedy, float32."""
    out, steps = tmp_path_factory.mktemp("finished"), []
    summary = evaluate(config_in(home, out), steps.append)
    return out, summary, steps


def answered(out):
    return {file.stem: answers.read(file) for file in sorted((out / "answers").glob("*.jsonl"))}


def tokens_of(out):
    return {
        (name, answer.question_id): answer.extra["token_ids"]
        for name, lines in answered(out).items()
        for answer in lines
    }


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
    assert json.loads((out / "summary.json").read_text()) == summary

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
    assert re.findall(r"\w+", table.splitlines()[2]) == ["Verifier", "T", "writing", "math", "overall"]
    for row in summary["configurations"][1:]:
        line = next(line for line in table.splitlines() if line.startswith(f"| {row['verifier']} "))
        cells = re.findall(r"(\d+\.\d\d) \((\d+\.\d\d)\)", line)
        groups = [*row["categories"].values(), row["overall"]]
        expected = [(g["acceptance_length"]["value"], g["speedup"]["value"]) for g in groups]
        assert np.allclose(np.array(cells, dtype=float), expected, atol=0.005)
    assert "Fewer than 10 questions" in page
    assert "Lines of the question file left out, 1: questions.jsonl:4" in page
    assert re.search(rf"of {3 * TURNS} answers were ended by max_new_tokens", page)


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
    record = json.loads((out / "config.json").read_text())
    record["config"]["target"] = "/gone/target"
    (out / "config.json").write_text(json.dumps(record))
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
        record = json.loads((finished[0] / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(record | {file: changed}))
        with pytest.raises(InputError, match=reason):
            evaluate(config_in(home, out))
        assert not (out / "summary.json").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"verifier": "topk,rrs-wo", "tree": "eagle;dynamic:depth=3,topk=2,nodes=8"}, "bias"),
        ({"verifier": "topk,nonsense"}, "nonsense"),
        ({"verifier": "topk,typical"}, "--allow-lossy"),
        ({"verifier": "topk,,greedy"}, "empty part"),
        ({"tree": "nonsense"}, "nonsense"),
        ({"temperature": "0,-1"}, "temperature is -1"),
        ({"temperature": "hot"}, "'hot' is not a number"),
        ({"tree": "a/x.json;b/x.json"}, "would both be called"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tmp_path, change, reason):
    config = EvalConfig(target="/no/such/target", head="/no/such/head", out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=reason) as caught:
        evaluate(replace(config, **change))
    assert getattr(caught.value, "exit_code", None) == 2
    assert not (tmp_path / "out").exists()


def test_a_verifier_may_name_its_own_tree():
    """One with options and commas included; the others go with every tree."""
    config = EvalConfig(
        "t", "h", "o", "q", "topk@dynamic:depth=3,topk=2,nodes=8,rrs,rrs-wo", "eagle;2x2", baseline=False
    )
    pairs = [(c.verifier, c.tree) for c in configurations(config)]
    both = [(verifier, tree) for verifier in ("rrs", "rrs-wo") for tree in ("eagle", "2x2")]
    assert pairs == [("topk", "dynamic:depth=3,topk=2,nodes=8"), *both]


def test_sampled_answers_repeat_with_the_seed_and_differ_by_turn_and_configuration(home, tmp_path):
    config = config_in(home, tmp_path / "a", temperature="1", max_new_tokens=6, verifier="rrs-wo,rrs", warm_up=0)
    for out in ("a", "b"):
        evaluate(replace(config, out=str(tmp_path / out)))
    assert tokens_of(tmp_path / "a") == tokens_of(tmp_path / "b")
    seeds = [seed for lines in answered(tmp_path / "a").values() for line in lines for seed in line.extra["seeds"]]
    assert len(set(seeds)) == 3 * TURNS
    line = answered(tmp_path / "a")["target-rrs-wo-t1"][0]
    assert line.extra["seeds"] == [seed_of(0, 1, turn, "target-rrs-wo-t1") for turn in (0, 1)]
    spec = Spec(Target.load(str(home / "target")), None)
    again = spec.generate(
        [{"role": "user", "content": QUESTIONS[0]["turns"][0]}],
        temperature=1.0,
        max_new_tokens=6,
        seed=seed_of(0, 1, 0, "target-baseline-t1"),
    )
    assert again.token_ids == answered(tmp_path / "a")["target-baseline-t1"][0].extra["token_ids"][0]


def test_verifiers_beyond_the_node_have_trees_of_their_own(home, tmp_path):
    """At temperature 0 all answer alike; at 1 they run over draws that each of them knows how to answer."""
    names = ["rrs-wo", "traversal", "block", "layer:greedy"]
    config = config_in(
        home, tmp_path, verifier=",".join(names), temperature="0,1", limit=2, turns=1, max_new_tokens=8, warm_up=0
    )
    rows = evaluate(config)["configurations"]
    assert [(row["verifier"], row["lossless"]) for row in rows] == [("baseline", True), *((n, True) for n in names)] * 2
    assert [row["same_as_baseline"] for row in rows[1:5]] == [{"same": 2, "answers": 2}] * 4
    answers_at_1 = [lines for name, lines in answered(tmp_path).items() if name.endswith("-t1")]
    assert all(line.new_tokens == [8] or line.extra["ended"] == ["model"] for lines in answers_at_1 for line in lines)
    drafted = {name: lines[0].extra["drafted"] for name, lines in answered(tmp_path).items() if name.endswith("-t1")}
    assert set(drafted["target-block-t1"]) == {drafted["target-block-t1"][0]}  # a chain
    assert drafted["target-traversal-t1"][1] == 2 * drafted["target-traversal-t1"][0]  # EAGLE-1's tree


def test_answers_that_the_context_ends_are_counted(home, tmp_path):
    config = config_in(home, tmp_path, max_new_tokens=1000, verifier="topk", limit=1, warm_up=0)
    summary = evaluate(config)
    eos = 2
    for row, lines in zip(summary["configurations"], answered(tmp_path).values(), strict=True):
        (line,) = lines
        for ids, prompt, end in zip(
            line.extra["token_ids"], line.extra["prompt_tokens"], line.extra["ended"], strict=True
        ):
            full = len(ids) == 256 - prompt or prompt >= 256
            assert end == ("model" if ids and ids[-1] == eos else "context")
            assert full or end == "model"
        assert row["ended"]["context"] == line.extra["ended"].count("context")
        assert sum(row["ended"].values()) == 2
    assert summary["configurations"][0]["ended"]["context"] > 0
    assert "ended by the target's context" in (tmp_path / "summary.md").read_text()


def test_one_row_of_steps_for_a_person_to_watch(finished):
    _, _, steps = finished
    texts = [step.text for step in steps]
    assert [step.done for step in steps][-9:] == list(range(1, 10))
    assert {step.total for step in steps} == {9}
    assert sum(text.startswith("warm-up") for text in texts) == 3
    assert all("tokens/s" in text for text in texts[-9:])


def test_lossy_verifiers_are_marked(home, tmp_path):
    config = config_in(
        home, tmp_path, verifier="topk,typical:delta=0.2", allow_lossy=True, temperature="1", limit=1, warm_up=0
    )
    rows = evaluate(config)["configurations"]
    assert {row["verifier"]: row["lossless"] for row in rows} == {
        "baseline": True,
        "topk": True,
        "typical:delta=0.2": False,
    }
    table = (tmp_path / "summary.md").read_text()
    assert re.findall(r"^\| (\S+ \(lossy\)|\S+) +\| 1 ", table, re.MULTILINE)[:3] == [
        "baseline",
        "topk",
        "typical:delta=0.2 (lossy)",
    ]


def test_options_with_commas_stay_whole():
    config = EvalConfig(
        "org/T-7B", "h", "o", verifier="is-lp:s=8,alphabet=50, topk", tree="chain:3;dynamic:depth=3,topk=2,nodes=8"
    )
    names = [c.model_id for c in configurations(config)]
    assert names == [
        "T-7B-baseline-t0",
        "T-7B-is-lp-s=8-alphabet=50-chain-3-t0",
        "T-7B-is-lp-s=8-alphabet=50-dynamic-depth=3-topk=2-nodes=8-t0",
        "T-7B-topk-chain-3-t0",
        "T-7B-topk-dynamic-depth=3-topk=2-nodes=8-t0",
    ]


def test_the_command_prints_lines_and_the_table_where_there_is_no_terminal(home, finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    app = typer.Typer()
    app.command()(command)
    options = {"--out": out, "--verifier": "topk,rrs-wo", "--max-new-tokens": 12, "--warm-up": 1}
    options |= {"--dtype": "float32", "--resamples": 50} | {f"--{name}": home / file for name, file in FILES.items()}
    result = CliRunner().invoke(app, [str(x) for pair in options.items() for x in pair], catch_exceptions=False)
    assert result.exit_code == 0
    assert (out / "summary.md").read_text().strip() in result.stdout
    assert "left out: questions.jsonl:4" in result.stdout


def test_a_folder_without_answers_says_so(finished, tmp_path):
    (tmp_path / "config.json").write_text((finished[0] / "config.json").read_text())
    with pytest.raises(InputError, match="no question is answered"):
        summarise(tmp_path)
