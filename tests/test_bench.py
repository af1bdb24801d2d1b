"""The benchmark: figures that are what they say, peers that say what we say."""

import json
import sys

import pytest
import torch
import transformers as hf
from evaluating import page_of, save_models
from models import GROUPED, random_model

from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.cli import main
from treespec.decoding.stats import Stats
from treespec.eval.bench.config import BenchConfig
from treespec.eval.bench.figures import Timed, bound, cycle_figures, speed_figures
from treespec.eval.bench.peers import generated
from treespec.eval.bench.run import bench
from treespec.eval.bench.run import load as load_models
from treespec.eval.bench.waiting import stage_times
from treespec.files.atomic import read_json
from treespec.shaping.sampling import SamplingParams


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    save_models(folder)
    return folder


def options_in(home, out, **changes):
    paths = {"target": home / "target", "head": home / "head", "questions": home / "questions.jsonl", "out": out}
    given = {name: str(path) for name, path in paths.items()} | {"contexts": "20", "rounds": 2, "dtype": "float32"}
    return given | {"max_new_tokens": 6, "limit": 2, "temperature": "0"} | changes


@pytest.fixture(scope="module")
def measured(home, tmp_path_factory):
    """A run with every peer; the target assists itself."""
    out = tmp_path_factory.mktemp("measured")
    changes = {"temperature": "0,1", "assistant": str(home / "target"), "verifier": "topk,rrs@2x2"}
    return out, bench(BenchConfig(**options_in(home, out, **changes)))


def test_the_bound_is_what_the_forwards_alone_would_give():
    assert bound(4.49, 5.9, 8.6, 4.6) == pytest.approx(2.007, abs=1e-3)
    assert bound(1.0, 5.0, 5.0, 0.0) == 1.0


def timed(tokens, cycles, seconds, **stages):
    stats = Stats(new_tokens=tokens, accepted=[0] * cycles)
    stats.seconds.update(stages | {"total": seconds})
    return Timed([0] * tokens, seconds, stats, stats)


def test_figures_of_given_times():
    """Two questions alike: 12 tokens in 4 cycles of 10 ms after a prefill, against 12 cycles of 5 ms."""
    mine = timed(12, 4, 0.060, prefill=0.020, draft=0.012, head=0.008, target=0.024, verify=0.002, commit=0.001)
    plain = timed(12, 12, 0.080, prefill=0.020, target=0.048)
    cycles = cycle_figures([mine] * 2, [plain] * 2, 0)
    overall = {name: figure["value"] for name, figure in cycles.pop("overall").items()}
    found = {name: figure["value"] for name, figure in cycles.items()}
    wanted = {"acceptance_length": 3, "cycle": 10, "head": 2, "rest_of_drafting": 1, "target": 6, "verify": 0.5}
    wanted |= {"commit": 0.25, "rest": 0.25, "overhead": 0.2, "tokens_per_second": 300, "speedup": 1.5}
    limits = {"bound": 3 * 4 / (6 + 2), "speedup_by_bound": 1.0}
    assert found == pytest.approx(wanted | limits)
    assert overall == pytest.approx({"speedup": 1.5} | limits)
    speed = speed_figures([mine] * 2, [plain] * 2, [mine] * 2, 0)
    for part in (speed.pop("overall"), speed):
        assert [part[name]["value"] for name in part] == pytest.approx([200, 80 / 60, 1])


def test_ratios_are_medians_of_the_questions_own():
    """A question that stalled does not move the median; the totals it does."""
    mine, others = [timed(10, 5, s) for s in (1, 2, 40)], [timed(10, 10, s) for s in (2, 4, 50)]
    found = speed_figures(mine, others, others, 0)
    assert found["over_generate"] == {"value": 2, "low": 1.25, "high": 2}
    assert found["overall"]["over_generate"]["value"] == pytest.approx(56 / 43)


def test_short_answers_count_by_their_tokens_overall():
    """Of three answers two end after two tokens: the median is theirs, the totals are the long one's."""
    mine = [timed(2, 1, 0.02, target=0.02)] * 2 + [timed(96, 24, 0.48, target=0.48)]
    plain = [timed(2, 2, 0.02, target=0.02)] * 2 + [timed(96, 96, 0.96, target=0.96)]
    found = cycle_figures(mine, plain, 0)
    assert found["speedup"]["value"] == pytest.approx(1)
    assert found["overall"]["speedup"]["value"] == pytest.approx(100 / 52)
    assert found["acceptance_length"]["value"] == pytest.approx(100 / 26)


def test_peers_say_in_float32_what_we_say_greedily(measured):
    _, found = measured
    greedy = [row for row in found["rows"] if row["temperature"] == 0]
    assert len(greedy) == 7
    assert [row["failed"] for row in greedy] == [None] * 7
    assert [row["same_as_one_token"] for row in greedy] == [2] * 7


def test_peers_run_in_the_checkpoints_dtype_and_layout_whatever_treespec_runs_in(home, tmp_path):
    config = BenchConfig(**options_in(home, tmp_path, dtype="bfloat16", assistant=str(home / "target")))
    models = load_models(config)
    assert models.spec.target.dtype == torch.bfloat16
    for peer in (models.stock, models.assistant):
        assert peer.dtype == torch.float32
        assert type(peer.lm_head) is torch.nn.Linear


def test_one_token_decoding_is_measured_twice_for_the_noise_of_the_clock(home, tmp_path):
    lines = [{"question_id": i, "category": "c", "turns": [f"Count {i}."]} for i in range(10)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = options_in(home, tmp_path / "out", limit=10, max_new_tokens=2, verifier="topk,rrs@2x2")
    result = bench(BenchConfig(**options | {"questions": str(tmp_path / "q.jsonl")}))
    names = [row["name"] for row in result["rows"] if not row["peer"]]
    assert names == ["one token", "one token, again", "topk", "rrs@2x2"]
    verdict = page_of(tmp_path / "out" / "bench.md").partition("## Verdict")[2]
    assert "too few" not in verdict
    assert "topk" in verdict
    assert "one token, again" not in verdict
    assert "At temperature 0 transformers' own methods have this many times plain decoding's tokens/s" in verdict


def test_peers_sample_from_the_whole_law_whatever_the_models_own_settings(home):
    """At a high temperature the tail comes up, which transformers' top_k of 50 would cut off."""
    spec = load(str(home / "target"), dtype="float32")
    model = spec.target.model
    model.generation_config = own = hf.GenerationConfig(top_k=1, repetition_penalty=9.0)
    answer = generated(model, (), 1e6, {}, [3, 4, 5], 200, 0)
    assert len(set(answer.tokens)) > 100  # 139 are expected of 259
    assert model.generation_config is own
    greedy = spec.generate([3, 4, 5], max_new_tokens=20).token_ids
    assert generated(model, spec.target.eos, 0.0, {}, [3, 4, 5], 20, 0).tokens == greedy


def run(monkeypatch, options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["treespec", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_peer_that_raises_says_why_in_its_row(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("treespec.eval.bench.peers.LOOKUPS", (0,))
    assert run(monkeypatch, options_in(home, tmp_path)) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    (row,) = [row for row in found["rows"] if row["name"].startswith("prompt lookup")]
    assert row["failed"]
    assert row["speed"] is None
    said = (tmp_path / "bench.md").read_text()
    assert f"failed: {' '.join(row['failed'].split())}" in " ".join(said.split())
    assert said == capsys.readouterr().out


def test_a_run_cut_short_leaves_no_file(home, tmp_path):
    def cut(step):
        if step.done > 0.7 * step.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(BenchConfig(**options_in(home, tmp_path, limit=1)), cut)
    assert not list(tmp_path.glob("[!.]*"))


def tables(text):
    """Title -> (label, second cell) -> the cells after them."""
    found = {}
    for part in text.partition("## Verdict")[0].split("## ")[1:]:
        lines = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line] for line in lines]
        found[part.splitlines()[0]] = {(label, second): rest for label, second, *rest in cells}
    return found


def test_the_files_say_what_was_measured(measured):
    out, found = measured
    assert read_json(out / "bench.json", "") == found
    page = (out / "report.html").read_text()
    assert all(row["name"] in page for row in found["rows"])
    assert [run["name"] for run in read_json(out / "trees.json", "")["traced"]] == [
        f"{name}, temperature {heat}" for heat in (0, 1) for name in ("topk", "rrs@2x2")
    ]
    forwards, steps, cycles, limits, beside = tables((out / "bench.md").read_text()).values()
    for row in found["rows"]:
        at, speed, cycle = (row["name"], f"{row['temperature']:g}"), row["speed"], row["cycle"]
        assert beside[at][0] == str(sum(answer["tokens"] for answer in row["answers"]))
        for column, said in ((1, speed), (4, speed["overall"])):
            assert beside[at][column].startswith(f"{said['tokens_per_second']['value']:.1f}")
        assert (at in limits) == (at in cycles) == (cycle is not None) == (not row["peer"])
        if cycle:
            assert cycles[at][0].startswith(f"{cycle['cycle']['value']:.2f}")
            said = (cycle["speedup"], cycle["bound"], cycle["overall"]["speedup"], cycle["overall"]["bound"])
            for column, figure in zip((2, 3, 5, 6), said, strict=True):
                assert limits[at][column].startswith(f"{figure['value']:.2f}")
    places = {("target", 1): (forwards, 0), ("target", 128): (forwards, 7)}
    places |= {("begin", 3): (steps, 0), ("extend", 10): (steps, 3)}
    for (what, nodes), (table, column) in places.items():
        (ms,) = [f["ms"] for f in found["forwards"] if (f["what"], f["nodes"]) == (what, nodes)]
        assert table["target" if what == "target" else "head", "20"][column].startswith(f"{ms['value']:.2f}")


def test_waiting_for_the_device_changes_times_alone(home):
    spec = load(str(home / "target"), str(home / "head"), tree="2x2", verifier="rrs", dtype="float32")
    for sampling in (0.0, 1.0):
        for one in (spec, spec.baseline()):
            fresh = Spec(spec.target, one.head, spec.policy, spec.verifier)
            plain = one.generate([3, 4, 5], temperature=sampling, max_new_tokens=12, seed=7).stats
            waited = stage_times(fresh, [3, 4, 5], SamplingParams(sampling), 12, 7)
            assert (waited.accepted, waited.new_tokens) == (plain.accepted, plain.new_tokens)
            assert waited.seconds["head"] > 0 or one.head is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"verifier": "judge"}, "unknown verifier 'judge'"),
        ({"verifier": "rrs@dynamic"}, "biases sampled draws"),
        ({"temperature": "hot"}, "'hot' is not a number"),
        ({"contexts": "20,129"}, "--contexts 129: the target's context holds 256 tokens"),
        ({"contexts": "many"}, "--contexts: 'many' is not a whole number"),
        ({"batches": "4,0"}, "--batches is 0, must be a whole number from 1"),
        ({"rounds": 1}, "--rounds is 1, must be a whole number from 2"),
        ({"assistant": "./nowhere"}, "no assistant directory at ./nowhere"),
        ({"assistant": "other"}, "--assistant has a vocabulary of 64, the target's is 259"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(home, tmp_path, monkeypatch, capsys, change, complaint):
    monkeypatch.chdir(tmp_path)
    if change.get("assistant") == "other":
        random_model(hf.LlamaConfig(**GROUPED)).save_pretrained("other")
        hf.AutoTokenizer.from_pretrained(home / "target").save_pretrained("other")
    assert run(monkeypatch, options_in(home, tmp_path / "out", **change)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("treespec: ")]
    assert len(lines) == 1
    assert complaint in lines[0]
    assert not list(tmp_path.glob("out/[!.]*"))
