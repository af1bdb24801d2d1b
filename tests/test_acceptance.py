"""The acceptance lab: logits that decoding would see, rates that sampling confirms, published numbers."""

import json

import pytest
import torch
from commands import complains
from drafters import extrapolate
from models import close, random_head, seeded, target
from scipy.stats import sem, t

from treespec.api.spec import Spec
from treespec.eval.acceptance.config import PAPER_PRESETS, AcceptanceConfig, list_cases, list_sweeps
from treespec.eval.acceptance.rates import accept, average
from treespec.eval.acceptance.sources import gather_step_logits
from treespec.eval.acceptance.table import build_sweep_table
from treespec.eval.intervals import Z
from treespec.eval.texts import Passage
from treespec.verify.registry import load_scheme


def test_the_error_is_that_of_the_mean_of_groups_or_of_sampling(tmp_path):
    """A pair of distributions is one position: nothing else varies. Of many groups the spread holds it already."""
    values = torch.randn(30, dtype=torch.float64, generator=seeded(3))
    for means, groups in ((values.view(6, 5).mean(1), torch.arange(30) // 5), (values, torch.arange(30))):
        found = average(values, groups)
        by_scipy = t.interval(0.95, len(means) - 1, means.mean(), sem(means))
        assert (found["value"], found["low"], found["high"]) == pytest.approx((means.mean().item(), *by_scipy))
    assert average(values, torch.zeros(30, dtype=torch.int64))["high"] is None
    assert average(torch.full((3,), 0.5), torch.arange(3), noise=0.2)["low"] == 0.5 - Z * 0.2

    # the table of figure 2 has a line for each distribution and a column for each method
    [rows] = accept(AcceptanceConfig(out=str(tmp_path), preset="khisti-figure2", samples=16))["sweeps"]
    means = [(row[kind], row["noise"]) for row in rows for kind in ("rate", "gap") if row[kind] and row["noise"]]
    assert len(means) > 9
    assert [mean["high"] - mean["value"] for mean, _ in means] == pytest.approx([Z * noise for _, noise in means])
    table = build_sweep_table(rows, "rate")
    assert len(table.rows) == 2 * 13 + 1
    assert {"rrs", "kseq", "α* with replacement"} <= {*table.columns}


def text(length, prompt=0, seed=4):
    tokens = torch.randint(3, 64, (length,), generator=seeded(seed))
    return Passage(tokens, torch.arange(length) >= prompt, seed)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_q_is_what_the_head_gives_along_a_chain_of_the_text(step):
    model = target("llama")
    head = random_head(model)
    whole = text(12, prompt=5)
    tokens = whole.tokens
    features = model.compute_features(whole.tokens[None])[0]
    found = gather_step_logits(Spec(model, head), [whole], step)
    places = [place for place in range(5, 12) if place > step]  # tokens whose distributions are wanted
    assert len(found.q) == len(places)
    plain = model.model(input_ids=tokens[None]).logits[0]
    for place, p, q in zip(places, found.p, found.q, strict=True):
        close(p, plain[place - 1], 1e-5, 1e-5)
        at = place - step
        hidden = extrapolate(head, tokens[1 : at + 1], features[:at], tokens[at + 1 : place].tolist())
        close(q, model.compute_output_logits(hidden)[0], 1e-4, 1e-4)


def test_fewer_positions_are_some_of_all_evenly_spread():
    spec = Spec(target("llama"), random_head(target("llama")))
    texts = [text(12, 4, seed=0), text(4, seed=1), text(20, 3, seed=2)]
    whole = gather_step_logits(spec, texts, 1)
    some = gather_step_logits(spec, texts, 1, positions=9)
    assert whole.group.bincount().tolist() == [8, 2, 17]
    rows = [int((whole.p - p).abs().sum(-1).argmin()) for p in some.p]
    assert rows == [round(i * 26 / 8) for i in range(9)]
    torch.testing.assert_close(whole.p[rows], some.p)
    torch.testing.assert_close(whole.q[rows], some.q)
    assert torch.equal(whole.group[rows], some.group)


def config_in(home, out, **changes):
    options = {"questions": f"{home}/questions.jsonl", "max_new_tokens": 6, "samples": 2, "verifier": "rrs,rrs-wo"}
    options |= {"draws": "2", "temperature": "1", "dtype": "float32"}
    return AcceptanceConfig(out=str(out), target=f"{home}/target", head=f"{home}/head", **options | changes)


def test_the_report_of_a_run_has_the_rates_and_their_optima(home, tmp_path):
    config = config_in(home, tmp_path, temperature="0.5,1", top_k=5)
    [rows] = accept(config)["sweeps"]
    assert {row["at"]["temperature"] for row in rows} == {0.5, 1.0}
    assert {row["groups"] for row in rows} == {3}
    assert accept(config)["sweeps"] == [rows]
    methods = ["rrs", "α* with replacement", "rrs-wo", "α* without replacement"]
    assert [row["method"] for row in rows] == methods * 2
    assert "α* without replacement" in (tmp_path / "acceptance.md").read_text()


def test_every_verifier_has_the_optimum_of_its_own_draws_beside_it(home, tmp_path):
    tail = "optimal:threshold=0.5,extra=0"
    named = f"topk,optimal:threshold=0,extra=0,optimal:threshold=1,extra=0,{tail},spechub"
    [rows] = accept(config_in(home, tmp_path, temperature="1", verifier=named))["sweeps"]
    optima = {row["method"]: row["rate"]["value"] for row in rows if row["method"].startswith("α*")}
    tail_draws = "tops and tail, threshold=0.5, extra=0"
    assert [*optima] == [f"α* {kind}" for kind in ("most likely", "greedy", "with replacement", tail_draws)]
    assert all(row["gap"]["value"] >= -1e-6 for row in rows if row["gap"])
    reached = [row["method"] for row in rows if row["gap"] and abs(row["gap"]["value"]) < 1e-3]
    assert {"topk", "spechub", tail} <= {*reached}


def test_given_text_is_read_as_what_it_is(home, tmp_path):
    """One token a byte: the pieces of a text without their first two, and the answers with what ends them."""
    words = "the assistant answers the question " * 40
    turns = {"user": "the question", "assistant": "the user answers"}
    messages = [{"role": role, "content": content} for role, content in turns.items()]
    (tmp_path / "words.txt").write_text(words)
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 3))
    pieces = [words[at : at + 256] for at in range(0, len(words), 256)]  # of the target's context
    answer = " the user answers\nassistant:"  # as `home`'s template ends every text
    for name, counted in {"words.txt": [piece[2:] for piece in pieces], "data.jsonl": [answer] * 3}.items():
        [rows] = accept(config_in(home, tmp_path / "out", text=f"{tmp_path}/{name}", positions=0))["sweeps"]
        assert rows[0]["positions"] == len("".join(counted))


@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_presets_are_sweeps_of_verifiers_that_exist(name, tmp_path):
    for sweep in list_sweeps(AcceptanceConfig(out=str(tmp_path), target="t", head="h", preset=name)):
        assert list_cases(sweep)
        for verifier in sweep.verifier.replace(",is-lp", " is-lp").split():
            assert verifier == "all" or load_scheme(verifier).lossless


def test_what_cannot_be_used_is_explained(home, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    for name, message in {"none.txt": "cannot read --text", "latin.txt": "UTF-8", "short.txt": "longer texts"}.items():
        with complains(message):
            accept(config_in(home, tmp_path / "out", text=f"{tmp_path}/{name}"))
    with complains("--target and --head"):
        accept(AcceptanceConfig(out=str(tmp_path), target="t"))
    with complains("spechub answers at most 2 draws"):
        accept(config_in(home, tmp_path / "out", verifier="spechub", draws="3"))
