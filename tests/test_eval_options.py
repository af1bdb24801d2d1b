"""What an evaluation measures by its options: which pairs, at which temperature, how far; and what it refuses."""

import re
from dataclasses import replace

import pytest
from evaluating import QUESTIONS, TURNS, answered, config_in, page_of, save_models, tokens_of

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.common import seed_of
from treespec.eval.mtbench.config import EvalConfig, configurations, drafters_of, drafters_with_trees, pairs_of
from treespec.eval.mtbench.run import evaluate
from treespec.model.target import Target


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    save_models(folder)
    return folder


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
        target="t",
        out="o",
        head="h",
        verifier="topk@dynamic:depth=3,topk=2,nodes=8,rrs,rrs-wo",
        tree="eagle;2x2",
        baseline=False,
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
    assert "ended by the target's context" in page_of(tmp_path / "summary.md")


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
        target="org/T-7B",
        out="o",
        head="h",
        verifier="is-lp:s=8,alphabet=50, topk@dynamic:depth=3,topk=2,nodes=8",
        tree="chain:3;2x2",
    )
    names = [c.model_id for c in configurations(config)]
    assert names == [
        "T-7B-baseline-t0",
        "T-7B-baseline-t0-again",
        "T-7B-is-lp-s=8-alphabet=50-chain-3-t0",
        "T-7B-is-lp-s=8-alphabet=50-2x2-t0",
        "T-7B-topk-dynamic-depth=3-topk=2-nodes=8-t0",
    ]


def test_drafters_with_commas_stay_whole():
    config = EvalConfig(target="T", out="o", drafter="sparse:512,snapkv,rest:store,nodes=4,sparse:64,snapkv,lookup")
    assert drafters_of(config) == ["sparse:512,snapkv", "rest:store,nodes=4", "sparse:64,snapkv", "lookup"]


def test_an_at_sign_belongs_to_the_directory_of_head_and_names_a_tree_in_a_list_of_drafters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert drafters_with_trees(EvalConfig(target="T", out="o", head="runs/h@2")) == [("head:runs/h@2", None)]
    listed = "sparse:512, snapkv@chain:3, eagle:h@2x4, eagle:k@2, lookup"
    (tmp_path / "k@2").mkdir()
    assert drafters_with_trees(EvalConfig(target="T", out="o", drafter=listed)) == [
        ("sparse:512,snapkv", "chain:3"),
        ("eagle:h", "2x4"),
        ("eagle:k@2", None),
        ("lookup", None),
    ]


def test_two_trees_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.json").write_text("[[0]]")
    config = EvalConfig(target="T", out="o", head="h", tree=f"{tmp_path}/a/x.json;{tmp_path}/b/x.json")
    with pytest.raises(InputError, match="would both be called"):
        configurations(config)


def test_every_drafter_gets_what_it_goes_with():
    """Three drafters, three verifiers: a tree of given tokens has `topk`, a named tree goes before the others."""
    config = EvalConfig(
        target="T",
        out="o",
        drafter="eagle:x/h, lookup:tokens=5,ngram=2, medusa:m@3x2",
        verifier="topk,rrs-wo@2x4",
        baseline=False,
    )
    rows = [(c.drafter, c.verifier, c.tree) for c in configurations(config)]
    assert rows == [
        ("eagle:x/h", "topk", None),
        ("eagle:x/h", "rrs-wo", "2x4"),
        ("lookup:tokens=5,ngram=2", "topk", None),
        ("medusa:m", "topk", "3x2"),
        ("medusa:m", "rrs-wo", "3x2"),
    ]
    (left_out,) = pairs_of(config)[1]
    assert "lookup:tokens=5,ngram=2 with rrs-wo" in left_out
    names = [c.model_id for c in configurations(config)]
    assert names[0] == "T-eagle-h-topk-t0"
    assert names[2] == "T-lookup-tokens=5-ngram=2-topk-t0"


def test_a_memory_beside_a_head_takes_the_heads_verifiers_and_trees():
    for drafter in ("suffix+eagle:h", "suffix:nodes=9+eagle:h", "suffix:memory,nodes=9+eagle:h"):
        config = EvalConfig(target="T", drafter=drafter, out="o", verifier="rrs-wo", tree="2x2", baseline=False)
        (row,) = configurations(config)
        assert (row.drafter, row.verifier, row.tree) == (drafter, "rrs-wo", "2x2")
    config = EvalConfig(target="T", drafter="suffix+lookup,eagle:h", out="o")
    with pytest.raises(InputError, match="lookup has no draft model to join"):
        configurations(config)


def test_a_tree_that_a_drafter_cannot_draft_is_refused_before_any_answer(home, tmp_path):
    config = config_in(home, tmp_path, verifier="traversal", tree="sampled", warm_up=0)
    with pytest.raises(InputError, match=r"head:.*head with traversal: the sampled tree needs"):
        evaluate(config)
    assert not (tmp_path / "config.json").exists()


def test_of_several_drafters_one_that_does_not_fit_is_left_out(home, tmp_path):
    drafters = f"head:{home}/head, lookup"
    changes = {"drafter": drafters, "head": None, "verifier": "traversal,topk", "tree": "sampled", "warm_up": 0}
    config = replace(config_in(home, tmp_path, limit=1, turns=1), **changes)
    summary = evaluate(config)
    assert {row["drafter"] for row in summary["configurations"]} == {None, "lookup"}
    assert any("traversal: the sampled tree needs" in reason for reason in summary["left_out"])
    assert evaluate(config)["left_out"] == summary["left_out"]


def test_given_tokens_are_verified_by_topk_where_nothing_else_fits():
    config = EvalConfig(target="T", out="o", drafter="eagle:h,lookup", verifier="rrs-wo", tree="2x2", baseline=False)
    assert [(c.drafter, c.verifier, c.tree) for c in configurations(config)] == [
        ("eagle:h", "rrs-wo", "2x2"),
        ("lookup", "topk", None),
    ]
