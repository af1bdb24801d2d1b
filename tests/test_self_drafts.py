"""The target as its own drafter: over a budget of its keys and values, or with sublayers left out, by a search."""

import json
import sys

import pytest
import torch
from commands import treespec
from equality import close
from growing import contents, joined, same
from models import CONFIGS, TableConfig, TableModel, as_undrafted, prompt, random_model, save_model, target
from refusals import complains
from test_draft_models import LONG, SOME, TOLERANCE

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.skip import refuse_what_cannot_skip
from treespec.draft.models.skip_set import SkipSet, load_skip_set, save_skip_set
from treespec.draft.models.sparse import SparseProposer, most_seen, refuse_what_shows_no_attention
from treespec.model.target import Target


@pytest.mark.parametrize("name, budget, window", [("llama", 8, 0), ("llama", 16, 4), ("mistral-window-6", 8, 0)])
def test_a_copy_that_grows_equals_one_that_is_made_at_once(name, budget, window):
    """As a text grows, shrinks and goes on otherwise, and with other texts beside it; SnapKV's choice is kept."""
    whole, text = target(name), [(11 * i) % 59 + 3 for i in range(60)]
    cache, grown = whole.new_cache(), SparseProposer(whole, budget, window)

    def commit(tokens):
        features = whole.prefill(cache, torch.tensor([tokens[:-1]]))
        grown.observe([features[0]], [torch.tensor(tokens)])

    commit(text[:24])
    for end, keep in ((24, 23), (27, 26), (30, 25), (29, 14), (18, 17), (20, 19), (40, 39)):
        fresh = SparseProposer(whole, budget, window)
        fresh.tokens, fresh.chosen = list(grown.tokens), list(grown.chosen)
        root = torch.tensor([text[end - 1]])
        for ours, wanted in zip(grown.begin(root, cache), fresh.begin(root, cache), strict=True):
            close(ours, wanted, TOLERANCE, TOLERANCE)
        cache.rewind([keep])
        grown.rewind([keep])
        text = [*text[:keep], *((5 * t) % 59 + 3 for t in text[keep:])]
        commit(text[keep : {24: 27, 27: 30, 30: 29, 29: 18, 18: 20, 20: 40, 40: 42}[end]])


def test_what_stays_is_what_the_last_tokens_saw_most():
    """Against the weights that the plain model reports, of three texts at once."""
    config = CONFIGS["llama"]()
    plain = random_model(config)
    plain.set_attn_implementation("eager")
    texts = [LONG[2][:20], LONG[2][5:], LONG[2][:9]]
    cache, _ = joined(target("llama"), SparseProposer(target("llama"), 8), [[*text, 0] for text in texts])
    before = contents(cache)
    windows = torch.tensor([text[-4:] for text in texts])
    found = most_seen(target("llama"), cache, windows, keep=5)
    assert same(before, contents(cache))
    for text, ours in zip(texts, found, strict=True):
        with torch.no_grad():
            layers = plain(torch.tensor([text]), output_attentions=True).attentions
        for layer, weights in enumerate(layers):
            start = len(text) - 4
            seen = weights[0, :, start:, :start].sum(1).unflatten(0, (2, 2)).sum(1)  # [key-value heads, start]
            for head in range(2):
                score = [float(torch.nn.functional.pad(seen[head], (2, 2))[i : i + 5].sum()) for i in range(start)]
                best = sorted(range(start), key=score.__getitem__, reverse=True)[:5]
                assert set(ours[layer, :, head].tolist()) == set(best)
    assert target("llama").config._attn_implementation == "trees"


def test_it_is_chosen_once_a_prompt_and_when_a_text_outgrows_the_budget():
    spec = Spec(target("llama"), SparseProposer(target("llama"), 16, 4), "chain:3")
    spec.generate(prompt(length=12), max_new_tokens=2)
    assert spec.decoder.drafter.proposer.chosen == [None]
    spec.generate(prompt(length=12), max_new_tokens=20)
    ((start, chosen),) = spec.decoder.drafter.proposer.chosen
    assert chosen.shape == (3, 12, 2)
    assert 12 <= start <= 20
    assert (chosen < start).all()


def test_layers_that_see_a_window_are_refused():
    with complains("MistralForCausalLM do not"):
        refuse_what_shows_no_attention(target("mistral-window-6"))
    eager = Target(random_model(CONFIGS["llama"]()))
    eager.model.set_attn_implementation("eager")
    with complains("LlamaForCausalLM has another"):
        refuse_what_shows_no_attention(eager)


def test_a_saved_set_is_loaded_and_drafts(tmp_path):
    words = save_model(tmp_path / "target")
    file = tmp_path / "skip.json"
    save_skip_set(SOME, file, {"target": str(words)})
    assert load_skip_set(file, 3) == SOME
    assert json.loads(file.read_text())["target"] == str(words)
    spec = load(str(words), None, "2x3", drafter=f"self:{file}", dtype="float32")
    as_undrafted(spec, [[5, 6]], 8)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"layers": Infinity, "attention": [], "mlp": []}', "is no skip set"),
        ('{"layers": 3, "mlp": []}', "is no skip set"),
        ('{"layers": 3, "attention": [1.5], "mlp": []}', "is no skip set"),
        ('{"layers": 3, "attention": [3], "mlp": []}', "names layer 3, the target's are 0 to 2"),
    ],
)
def test_another_file_is_refused(tmp_path, content, complaint):
    (tmp_path / "skip.json").write_text(content)
    with complains(complaint):
        load_skip_set(tmp_path / "skip.json", 3)


def test_models_of_another_build_are_refused_by_name():
    for model in (target("gpt2"), target("opt"), target("gpt-oss"), Target(TableModel(TableConfig(4)))):
        with complains(f"{type(model.model).__name__} cannot draft with layers skipped"):
            refuse_what_cannot_skip(model)
    for name in CONFIGS.keys() & {"llama", "qwen3", "phi3", "gemma3", "granite", "cohere"}:
        refuse_what_cannot_skip(target(name))


def test_the_search_finds_what_is_useless():
    """Of 8 sublayers three cost nothing to skip and gain a tenth each, all others cost more than they gain."""
    from treespec.eval.skip_search import search

    free, tried = SkipSet(4, (1, 3), (2,)), []

    def speed(skipped):
        tried.append(skipped)
        right = len({*skipped.attention} & {*free.attention}) + len({*skipped.mlp} & {*free.mlp})
        return 1 + 0.1 * right - 0.1 * (len(skipped.attention) + len(skipped.mlp) - right)

    best, value, trials = search(speed, layers=4, trials=30)
    assert (best, trials, len(tried)) == (free, 30, 30)
    assert value == pytest.approx(1.3)
    assert tried[0] == SkipSet(4)
    assert search(speed, layers=4, trials=10_000, minutes=0.001)[2] < 100


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_the_command_writes_a_skip_set_that_drafts(tmp_path, monkeypatch, capsys, name):
    words, text, out = save_model(tmp_path / "target"), tmp_path / name, tmp_path / "skip.json"
    turns = [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "the answer"}]
    line = json.dumps({"messages": turns}) + "\n"
    text.write_text(line * 3 if name.endswith("jsonl") else "the user asks and the assistant answers " * 9)
    options = f"--text {text} --out {out} --trials 4 --limit 2 --max-new-tokens 6 --dtype float32"
    assert treespec(f"skip --target {words} {options}") == 0
    assert "4/4" in capsys.readouterr().err
    kept = json.loads(out.read_text())
    assert (kept["target"], kept["trials"], kept["layers"]) == (str(words), 4, 3)
    assert load_skip_set(out, 3).layers == 3
    as_undrafted(load(str(words), None, "confident", drafter=f"self:{out}", dtype="float32"), [[5, 6]], 8)


def test_without_the_library_the_extra_is_named(model_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert treespec(f"skip --target {model_folder} --text {__file__}") == 2
    assert capsys.readouterr().err == "treespec: treespec skip searches with optuna: pip install 'treespec[skip]'\n"
