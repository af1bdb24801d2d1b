"""The target as its own drafter: which sublayers it skips, and where its chains end."""

import json
from contextlib import suppress

import pytest
import torch
from commands import complains, treespec
from drafters import build_spec
from models import TableConfig, TableModel, as_undrafted, prompt, seeded, target
from training import save_model

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.builders import CycleBuilder
from treespec.draft.models.skip import Skipping, SkipProposer, refuse_other_layers
from treespec.draft.models.skip_set import SkipSet, load_skip_set, save_skip_set, spread_skipped_layers
from treespec.eval import skip_search
from treespec.eval.texts import Passage
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.trees.confident import ConfidentChain
from treespec.verify.registry import load_scheme


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_skipped_layers_everything_is_accepted(temperature):
    spec = build_spec("llama", "self:percent=0", tree="chain:4", verifier="single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True).stats
    assert stats.accepted == [4] * 8


def test_an_interrupt_leaves_the_target_whole():
    whole = target("llama")
    modules = dict(whole.model.named_modules())
    skipping = Skipping(whole, SkipSet(3, attention=(1,), mlp=(0, 1)))
    with suppress(KeyboardInterrupt), skipping.active():
        assert dict(whole.model.named_modules()) != modules
        raise KeyboardInterrupt
    assert dict(whole.model.named_modules()) == modules


def test_models_of_another_build_are_refused_by_name():
    for model in (target("gpt2"), target("opt"), target("gpt-oss"), Target(TableModel(TableConfig(4)))):
        with complains(f"{type(model.model).__name__} cannot draft with layers skipped"):
            refuse_other_layers(model)
    for name in ("llama", "qwen3", "phi3", "gemma3", "granite", "cohere"):
        refuse_other_layers(target(name))


def test_layers_are_spread_as_they_are_drawn():
    assert spread_skipped_layers(10, 40) == SkipSet(10, (1, 3, 5, 7), (1, 3, 5, 7))
    assert spread_skipped_layers(4, 100) == SkipSet(4, (1, 2), (1, 2))
    assert spread_skipped_layers(1, 50) == SkipSet(1)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"layers": Infinity, "attention": [], "mlp": []}', "is for a target of inf layers, this one has 3"),
        ('{"layers": 4, "attention": [], "mlp": []}', "is for a target of 4 layers, this one has 3"),
        ('{"layers": 3, "mlp": []}', "attention is None, must be a list of layers from 0 to 2"),
        ('{"layers": 3, "attention": [1.5], "mlp": []}', "attention is"),
        ('{"layers": 3, "attention": [], "mlp": [3]}', "mlp is"),
    ],
)
def test_another_file_is_refused(tmp_path, content, complaint):
    (tmp_path / "skip.json").write_text(content)
    with complains(complaint):
        load_skip_set(tmp_path / "skip.json", 3)


def test_the_search_finds_what_is_useless():
    """Of eight sublayers three gain a tenth each if they are skipped, and all others cost as much."""
    useless = {("self_attn", 1), ("self_attn", 3), ("mlp", 2)}
    sublayers = [(name, number) for name in ("self_attn", "mlp") for number in range(4)]
    tried = []

    def predict(skipped):
        tried.append(skipped)
        gain = len(skipped & useless) - len(skipped - useless)
        return skip_search.SkipPrediction(1 + 0.1 * gain, 1, 1.0, 1.0)

    best, prediction = skip_search.search(sublayers, predict, evaluations=30, seed=0)
    assert (best, prediction.speedup) == (useless, pytest.approx(1.3))
    assert len(tried) == len({*tried}) <= 30
    again = list(tried)
    tried.clear()
    skip_search.search(sublayers, predict, evaluations=30, seed=0)
    assert tried == again


def test_chains_along_a_text_agree_as_far_as_drafts_are_accepted():
    whole = target("llama")
    skipped = SkipSet(3, attention=(2,))
    text = prompt(5) + Spec(whole, None).generate(prompt(5), max_new_tokens=72, ignore_eos=True).token_ids
    counts = torch.arange(len(text)) >= 5
    bench = skip_search.ChainBench(whole, [Passage(torch.tensor(text), counts, 0)], chains=9)
    spec = Spec(whole, SkipProposer(whole, skipped), "chain:8", "single")
    accepted = []
    for root in range(4, len(text) - 8, 8):
        answer = spec.generate(text[: root + 1], max_new_tokens=9, ignore_eos=True)
        accepted.append(answer.stats.accepted[0])
    reach = [sum(n >= depth for n in accepted) / len(accepted) for depth in range(1, 9)]
    assert len({*reach}) > 3
    assert bench.measure_reach(skipped).tolist() == pytest.approx(reach)
    assert bench.predict(SkipSet(3)) == skip_search.SkipPrediction(1.0, 1, 2.0, 1.0)


def test_the_command_writes_a_file_that_drafts(tmp_path, capsys):
    folder = save_model(tmp_path / "target")
    text = tmp_path / "text.txt"
    out = tmp_path / "skip.json"
    text.write_text("the user asks and the assistant answers " * 9)
    options = f"--text {text} --out {out} --evaluations 9 --chains 4 --dtype float32"
    assert treespec(f"skip-search --target {folder} {options}") == 0
    assert "Of 3 layers" in capsys.readouterr().out
    fields = json.loads(out.read_text())
    assert (fields["target"], fields["evaluations"], fields["layers"]) == (str(folder), 9, 3)
    save_skip_set(load_skip_set(out, 3), out, {})
    spec = load(str(folder), None, "confident", drafter=f"self:{out}", dtype="float32")
    as_undrafted(spec, ["the user", "the assistant asks"], 8)


def grow_chain(policy, levels, params, scheme):
    """The chain that a policy grows. levels: [V] probabilities below the root and below each drafted token."""
    rows = [torch.tensor([level]).log() for level in levels]
    builder = CycleBuilder(torch.tensor([9]), rows[0], params, seeded(0), load_scheme(scheme))
    growth = policy.grow(builder)
    request = next(growth)
    asked = 1
    while True:
        reply = request
        if not isinstance(request, torch.Tensor):
            reply = rows[asked]
            asked += 1
        try:
            request = growth.send(reply)
        except StopIteration as end:
            return end.value, asked


@pytest.mark.parametrize("temperature, scheme", [(0.0, "topk"), (1.0, "topk"), (1.0, "single")])
def test_a_chain_ends_below_its_first_unsure_token(temperature, scheme):
    """The drawing of `ConfidentChain`: the unsure token stays, and nothing is drafted below it."""
    levels = [[0.9, 0.1, 0.0], [0.3, 0.7, 0.0], [0.3, 0.3, 0.4], [0.0, 0.2, 0.8]]
    if scheme == "single":  # the drawn token's own probability counts
        levels = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.34, 0.33, 0.33], [0.0, 0.0, 1.0]]
    params = SamplingParams(temperature)
    tree, asked = grow_chain(ConfidentChain(threshold=0.6), levels, params, scheme)
    assert (len(tree.tokens), asked) == (4, 3)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    tree, asked = grow_chain(ConfidentChain(depth=4, threshold=0.0), levels, params, scheme)
    assert (len(tree.tokens), asked) == (5, 4)


def test_the_threshold_follows_the_acceptance_rate():
    policy = ConfidentChain(depth=4, threshold=0.5, goal=0.5, step=0.1)
    lower = policy.adapt(accepted=2, drafted=2)
    assert (lower.rate, lower.threshold) == (0.5, pytest.approx(0.49))
    assert policy.adapt(4, 4).threshold == 0.5  # a chain of full depth was no shorter for the threshold
    higher = lower.adapt(0, 3)
    assert (higher.rate, higher.threshold) == (0.25, pytest.approx(0.5))


def test_each_text_has_a_threshold_of_its_own():
    spec = build_spec("llama", "self", tree="confident:threshold=0.3")
    as_undrafted(spec, [prompt(), prompt(20)], 24)
    second = spec.generate([prompt(), prompt(20)], max_new_tokens=24, batch=2)[1]
    alone = spec.generate(prompt(20), max_new_tokens=24)
    assert (second.stats.drafted, second.stats.accepted) == (alone.stats.drafted, alone.stats.accepted)
