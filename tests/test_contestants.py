"""Who is asked by an evaluation's options: which pairs, at which temperature; and what is refused."""

from dataclasses import replace

from commands import complains, config_in, read_completions, tokens_of, wait_until, write_questions

from treespec import load
from treespec.eval.benchmark import evaluate
from treespec.eval.config import EvalConfig, parse_drafters
from treespec.eval.systems import list_drafter_pairs, list_systems


def config_of(**options):
    return EvalConfig(**{"target": "T", "out": "o", "baseline": False} | options)


def rows_of(**options):
    return [(one.drafter, one.method, one.tree) for one in list_systems(config_of(**options))]


def test_lists_name_who_is_asked():
    """A verifier may name its tree, with options and commas; others go with every tree."""
    names = "topk@dynamic:depth=3,topk=2,nodes=8,rrs,optimal:extra=0,exact=1"
    both = [("head:h", name, tree) for name in ("rrs", "optimal:extra=0,exact=1") for tree in ("eagle", "2x2")]
    found = rows_of(head="h", verifier=names, tree="eagle;2x2")
    assert found == [("head:h", "topk", "dynamic:depth=3,topk=2,nodes=8"), *both]
    config = config_of(
        target="org/T-7B", head="h", verifier="optimal:extra=0,exact=1, rrs", tree="chain:3", baseline=True
    )
    assert [one.name for one in list_systems(config)] == [
        "T-7B-baseline-t0",
        "T-7B-baseline-t0-again",
        "T-7B-optimal-extra=0-exact=1-chain-3-t0",
        "T-7B-rrs-chain-3-t0",
    ]


def test_peers_are_asked_too_transformers_one_prompt_at_a_time():
    peers = "http://localhost:8000/v1,org/M-7B,transformers,https://other/v1"
    config = config_of(head="h", verifier="topk", peers=peers, assistant="small", batch="1,2", temperature="0,1")
    found = [one for one in list_systems(config) if one.peer]
    assert [(one.method, one.batch) for one in found if one.temperature == 1] == [
        ("org/M-7B", 1),
        ("generate", 1),
        ("prompt lookup 3", 1),
        ("prompt lookup 10", 1),
        ("assisted generation", 1),
        ("what it serves", 1),
        ("org/M-7B", 2),
        ("what it serves", 2),
    ]
    assert found[0].peer == "http://localhost:8000/v1"
    assert found[0].name == "T-localhost-8000-v1-org-M-7B-t0-b1"
    assert len({one.name for one in found}) == len(found)
    assert all(one.lossless for one in found)


def test_drafters_may_have_commas_and_an_at_sign_names_a_tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k@2").mkdir()
    listed = "suffix:nodes=9, growth=3+eagle:h@chain:3, suffix:store,nodes=4, eagle:h@2x4, eagle:k@2,suffix"
    assert [(spec.written, spec.tree) for spec in parse_drafters(config_of(drafter=listed))] == [
        ("suffix:nodes=9,growth=3+eagle:h", "chain:3"),
        ("suffix:store,nodes=4", None),
        ("eagle:h", "2x4"),
        ("eagle:k@2", None),
        ("suffix", None),
    ]


def test_two_trees_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.json").write_text("[[0]]")
    with complains("would both be called"):
        rows_of(head="h", tree=f"{tmp_path}/a/x.json;{tmp_path}/b/x.json")


def test_every_drafter_gets_what_it_goes_with():
    """A tree of given tokens has `topk`, a named tree goes before the others."""
    options = {"drafter": "eagle:x/h, suffix:tokens=5,nodes=2, medusa:m@3x2", "verifier": "topk,rrs-wo@2x4"}
    assert rows_of(**options) == [
        ("eagle:x/h", "topk", None),
        ("eagle:x/h", "rrs-wo", "2x4"),
        ("suffix:tokens=5,nodes=2", "topk", None),
        ("medusa:m", "topk", "3x2"),
        ("medusa:m", "rrs-wo", "3x2"),
    ]
    (left_out,) = list_drafter_pairs(config_of(**options))[1]
    assert "suffix:tokens=5,nodes=2 with rrs-wo" in left_out
    names = [one.name for one in list_systems(config_of(**options))]
    assert (names[0], names[2]) == ("T-eagle-h-topk-t0", "T-suffix-tokens=5-nodes=2-topk-t0")
    assert rows_of(drafter="eagle:h,suffix", verifier="rrs-wo", tree="2x2") == [
        ("eagle:h", "rrs-wo", "2x2"),
        ("suffix", "topk", None),
    ]


def test_a_suffix_cache_with_a_head_takes_the_heads_verifiers_and_trees():
    for drafter in ("suffix+eagle:h", "suffix:nodes=9+eagle:h", "suffix:memory,nodes=9+eagle:h"):
        assert rows_of(drafter=drafter, verifier="rrs-wo", tree="2x2") == [(drafter, "rrs-wo", "2x2")]
    with complains("suffix has no draft model to join"):
        rows_of(drafter="suffix+suffix,eagle:h")


def test_a_tree_that_a_drafter_cannot_draft_is_refused_or_left_out(home, tmp_path):
    config = config_in(home, tmp_path, verifier="traversal", tree="ddtree", warm_up=0, limit=1, turns=1)
    with complains(r"head:.*head with traversal: the tree ddtree needs"):
        evaluate(config)
    assert not (tmp_path / "ledger.jsonl").exists()
    several = replace(config, drafter=f"head:{home}/head, suffix", head=None, verifier="traversal,topk")
    summary = evaluate(several)
    assert {row["drafter"] for row in summary["rows"]} == {None, "suffix"}
    assert any("traversal: the tree ddtree needs" in reason for reason in summary["left_out"])
    assert evaluate(several)["left_out"] == summary["left_out"]


def test_tree_verifiers_have_trees_of_their_own_and_lossy_ones_are_marked(home, tmp_path):
    """At temperature 0 the lossless answer alike; at 1 they run over draws that each of them verifies."""
    names = ["rrs-wo", "traversal", "block", "typical:delta=0.2"]
    options = {"verifier": ",".join(names), "allow_lossy": True, "temperature": "0,1"}
    rows = evaluate(config_in(home, tmp_path, **options, limit=2, turns=1, max_new_tokens=8, warm_up=0))["rows"]
    marks = [(name, not name.startswith("typical")) for name in ["baseline", *names]]
    assert [(row["method"], row["lossless"]) for row in rows] == marks * 2
    assert [row["same"] for row in rows[1:5]] == [2] * 4
    at_1 = {name: own for name, own in read_completions(tmp_path).items() if name.endswith("-t1")}
    assert all(one["new_tokens"] == [8] or one["ended"] == ["model"] for own in at_1.values() for one in own)
    block, traversal = (at_1[f"target-{name}-t1"][0]["drafted"] for name in ("block", "traversal"))
    assert set(block) == {block[0]}  # a chain
    assert traversal[1] == 2 * traversal[0]  # EAGLE-1's tree
    assert "| typical:delta=0.2 (lossy) |" in (tmp_path / "report.md").read_text()


def test_a_suffix_cache_reads_its_folder_and_no_other_completion(home, tmp_path):
    def cycles(out, drafter="suffix"):
        twice = [{"question_id": i, "category": "a", "turns": ["the user asks"]} for i in (1, 2)]
        questions = write_questions(tmp_path / "twice.jsonl", twice)
        wanted = {"head": None, "drafter": drafter, "verifier": "topk", "questions": questions}
        evaluate(config_in(home, tmp_path / out, **wanted))
        own = next(own for name, own in read_completions(tmp_path / out).items() if "baseline" not in name)
        return [sum(one["cycles"]) for one in own]

    alone = cycles("none")
    folder = tmp_path / "kept"
    assert alone[0] == alone[1]  # warm-up, baseline and the question before told nothing
    (tokens, *_), *_ = tokens_of(tmp_path / "none").values()
    spec = load(f"{home}/target", drafter=f"suffix:{folder}", verifier="topk")
    spec.decoder.drafter.remember("", tokens)
    wait_until(lambda: [*folder.glob("*.safetensors")])
    before = sorted((file.name, file.read_bytes()) for file in folder.rglob("*.*"))
    assert max(cycles("read", f"suffix:{folder}")) < alone[0]
    assert sorted((file.name, file.read_bytes()) for file in folder.rglob("*.*")) == before
    with complains("there is no folder"):
        cycles("refused", f"suffix:{folder}s")
