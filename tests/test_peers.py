"""Other programs next to ours: transformers' methods say what we say, servers are timed as clients see them."""

from threading import Thread

import pytest
import torch
import transformers as hf
from commands import (
    SERVED_NAME,
    FakeServer,
    complains,
    config_in,
    options_in,
    page_of,
    read_completions,
    run_command,
    save_home,
    serving,
)
from models import GROUPED, random_head, random_model

from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.draft.auto.measure import measure_model_costs
from treespec.draft.vocabulary import restrict
from treespec.eval import systems as contestants
from treespec.eval.answering import PromptRequest
from treespec.eval.benchmark import evaluate
from treespec.eval.ledger import Ledger
from treespec.eval.peers import EndpointPeer, TransformersPeer, load_assistant, load_stock
from treespec.eval.systems import GENERATE_METHOD, System
from treespec.files import openai_client as endpoint
from treespec.model.target import Target


@pytest.fixture(scope="module")
def measured(home, tmp_path_factory):
    """A run with all of transformers' methods; the target assists itself."""
    out = tmp_path_factory.mktemp("measured")
    changes = {"temperature": "0,1", "verifier": "topk,rrs@2x2", "max_new_tokens": 6, "turns": 1}
    more = {"peers": "transformers", "assistant": f"{home}/target"}
    summary = evaluate(config_in(home, out, **changes, **more))
    return out, summary


def test_a_level_of_a_head_with_few_draft_tokens_is_timed():
    model = Target(random_model(hf.LlamaConfig(**GROUPED)))
    head = random_head(model)
    restrict(head, model, torch.tensor([1, 5]))
    assert measure_model_costs(model, Spec(model, head).proposer, context=8).forward


def test_transformers_says_in_float32_what_we_say_greedily(measured):
    greedy = [row for row in measured[1]["rows"] if row["temperature"] == 0]
    assert [row["method"] for row in greedy[3:]] == [*contestants.TRANSFORMERS_METHODS][:4]
    assert [row["same"] for row in greedy] == [None] + [3] * 6
    assert measured[1]["failed"] == {}


def tables(text):
    """Title -> rows of cells, the heads first."""
    parts = text.partition("## Verdict")[0].split("## ")[1:]
    lines = {part.splitlines()[0]: [line for line in part.splitlines() if line.startswith("|")] for part in parts}
    return {title: [[c.strip() for c in line.split("|")[1:-1]] for line in own] for title, own in lines.items()}


def test_the_report_compares_with_peers_and_bounds(measured):
    out, summary = measured
    found = tables((out / "report.md").read_text())
    (_, _, *speed), limits = found[next(iter(found))], found["Speedup without prompts, and its bound"]
    for row, (name, tree, temperature, tau, speed_cell, *_) in zip(summary["rows"], speed, strict=True):
        overall = row["overall"]
        assert name == f"{row['method']}, transformers" if row["peer"] else row["method"]
        assert (tree, temperature) == (row["tree"] or "", f"{row['temperature']:g}")
        assert float(speed_cell.split()[0]) == pytest.approx(overall["tokens_per_second"]["value"], rel=0.05)
        assert (row["by_generate"] is None) == (row["method"] == GENERATE_METHOD)
        assert (tau == "") == (overall["acceptance_length"]["value"] is None) == bool(row["peer"])
    assert [cells[0] for cells in limits[2:]] == ["topk", "rrs"] * 2
    page = (out / "report.html").read_text()
    assert "Speedup without prompts, and its bound" in page


def test_named_methods_give_equal_text_and_unavailable_ones_say_why(home, tmp_path):
    """Half of the layers draft; a model with other tokens drafts; this target has no MTP layers."""
    save_home(tmp_path, 8)
    peers = ",".join(
        f"transformers,{name}" for name in (contestants.EARLY_EXIT_METHOD, contestants.ASSISTED_METHOD, "MTP")
    )
    more = {"verifier": "topk", "max_new_tokens": 6, "turns": 1, "assistant": f"{tmp_path}/target"}
    summary = evaluate(config_in(home, tmp_path / "out", peers=peers, **more))
    assert [(row["method"], row["same"]) for row in summary["rows"][2:]] == [
        ("early exit", 3),
        ("assisted generation", 3),
    ]
    assert "num_mtp_layers" in summary["failed"]["target-MTP-t0"]


def test_a_dflash_model_assists_where_transformers_has_one(home, tmp_path):
    if not hasattr(hf, "MuseGlimmerAssistantConfig"):
        pytest.skip("transformers has no DFlash model")
    target = load(f"{home}/target").target.model.config
    sizes = {name: getattr(target, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    more = {"num_hidden_layers": 1, "head_dim": 8, "block_size": 4, "mask_token_id": 9, "target_layer_ids": [0, 1]}
    more |= {"num_key_value_heads": sizes["num_attention_heads"]}
    config = hf.MuseGlimmerAssistantConfig(**sizes, **more, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    hf.AutoModel.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "dflash")
    changes = {"verifier": "topk", "max_new_tokens": 6, "turns": 1, "assistant": f"{tmp_path}/dflash"}
    summary = evaluate(config_in(home, tmp_path / "out", peers="transformers,assisted generation", **changes))
    assert [row["same"] for row in summary["rows"][2:]] == [3]
    assert not summary["failed"]


def test_peers_run_in_the_checkpoints_dtype_and_layout_whatever_treespec_runs_in(home, tmp_path):
    config = config_in(home, tmp_path, dtype="bfloat16", peers="transformers", assistant=f"{home}/target")
    target = load(f"{home}/target", dtype="bfloat16").target
    for peer in (load_stock(config), load_assistant(config, target)):
        assert peer.dtype == torch.float32
        assert type(peer.lm_head) is torch.nn.Linear


def test_transformers_samples_from_the_whole_distribution_whatever_the_models_own_settings(home, tmp_path):
    """At a high temperature the tail comes up, which transformers' top_k of 50 would cut off."""
    spec = load(f"{home}/target", dtype="float32")
    model = spec.target.model
    model.generation_config = own = hf.GenerationConfig(top_k=1, repetition_penalty=9.0)
    config = config_in(home, tmp_path)
    ask = PromptRequest([], [3, 4, 5], 0, 200)
    stock = {
        t: TransformersPeer(model, None, spec.target, System(GENERATE_METHOD, temperature=t), config)
        for t in (0.0, 100.0)
    }
    stock[100.0].sampling["temperature"] = 1e6
    assert len(set(stock[100.0].generate_tokens(ask, ()))) > 100  # 139 are expected of 259
    assert model.generation_config is own
    greedy = spec.generate([3, 4, 5], max_new_tokens=20)
    (output,) = stock[0.0].answer([ask._replace(max_new_tokens=20)])
    assert (output.token_ids, output.text) == (greedy.token_ids, greedy.text)
    assert output.stats.truncated == greedy.stats.truncated


def test_a_peer_that_fails_says_why_and_is_retried_later(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(contestants.TRANSFORMERS_METHODS, "prompt lookup 3", {"prompt_lookup_num_tokens": 0})
    options = options_in(home, tmp_path, peers="transformers", limit=1, verifier="topk", max_new_tokens=4)
    assert run_command(options) == 0
    said = (tmp_path / "report.md").read_text()
    printed = capsys.readouterr()
    assert said == printed.out
    assert "left out: questions.jsonl:4" in printed.err
    assert "Ledger and report are in" in printed.err
    (failed,) = {entry["why"] for entry in Ledger(tmp_path).list_entries("failed")}
    assert f"target-prompt-lookup-3-t0 failed: {' '.join(failed.split())}." in " ".join(said.split())
    assert "target-prompt-lookup-3-t0" not in read_completions(tmp_path)
    monkeypatch.undo()
    summary = evaluate(config_in(home, tmp_path, peers="transformers", limit=1, verifier="topk", max_new_tokens=4))
    assert summary["failed"] == {}
    assert len(summary["rows"]) == 5


@pytest.mark.parametrize(
    "complaint, change",
    {
        "no assistant directory at ./nowhere": {"assistant": "./nowhere", "peers": "transformers"},
        "transformers' methods are generate, prompt lookup 3": {"peers": "transformers,magic"},
        "needs an --assistant": {"peers": "transformers,assisted generation"},
        "--peers http://127.0.0.1:1/v1: the server does not answer: ": {"peers": "http://127.0.0.1:1/v1"},
    }.items(),
)
def test_bad_input_is_one_line_and_exit_code_2(home, tmp_path, monkeypatch, capsys, change, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert run_command(options_in(home, tmp_path / "out", limit=1, **change)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("treespec: ")]
    assert complaint in line
    assert not list(tmp_path.glob("out/[!.]*"))


def test_a_server_is_measured_as_its_client_sees_it(home, tmp_path):
    """treespec's own: its greedy texts are the baseline's, two conversations at a time too."""
    with serving(load(f"{home}/target", drafter="suffix:tokens=0", dtype="float32")) as state:
        address = f"{state.url}/v1"
        options = {
            "verifier": "topk",
            "max_new_tokens": 8,
            "batch": "1,2",
            "peers": f"{address},{SERVED_NAME},{address}",
        }
        summary = evaluate(config_in(home, tmp_path, **options))
    served = [row for row in summary["rows"] if row["peer"]]
    assert [(row["method"], row["batch"]) for row in served] == [
        (SERVED_NAME, 1), ("what it serves", 1), (SERVED_NAME, 2), ("what it serves", 2)
    ]  # fmt: skip
    baseline = read_completions(tmp_path)["target-baseline-t0-b1"]
    for row in served:
        overall = row["overall"]
        own = read_completions(tmp_path)[row["name"]]
        assert (row["same"], row["turns"]) == (5, 5)
        for one, plain in zip(own, baseline, strict=True):
            for name in ("turns", "new_tokens", "prompt_tokens", "ended"):
                assert one[name] == plain[name]
        assert 0 < overall["first_token"] < overall["seconds"]
        assert overall["speedup"]["value"] > 0
        assert overall["cycles"] == 0
    assert "as its client sees it" in page_of(tmp_path / "report.md")


@pytest.mark.parametrize(
    "trouble, words",
    [
        (401, r"refuses with HTTP 401: .*; its key is taken from OPENAI_API_KEY"),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, "reports no usage"),
        ({"error": "x"}, "answers with no chat completion"),
    ],
)
def test_what_a_server_does_wrong_is_said_in_a_line(home, tmp_path, monkeypatch, trouble, words):
    monkeypatch.setenv(endpoint.API_KEY_VARIABLE, "secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with FakeServer() as fake:
        fake.troubles = {0: trouble}
        Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
        with complains(words):
            asked = [PromptRequest([{"role": "user", "content": "Hi"}], [5], 0, 4)]
            EndpointPeer(System("m", peer=fake.url), config_in(home, tmp_path)).answer(asked)
        fake.shutdown()
    assert [key for _, key, _ in fake.requests] == ["Bearer secret"]
