"""Decoding changes no token: greedy to the token, sampling to the law, and it ends where a text ends."""

import itertools
import math

import pytest
import torch
from enumeration import STOCHASTIC
from models import CONFIGS, random_head, random_model, target

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import Cost
from treespec.draft.pairing import check_pair, default_tree
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import policy
from treespec.verify.facts import NAMES
from treespec.verify.registry import SCHEMES, scheme_by_name


def prompt(length=7, seed=3):
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_generate(model, ids, new):
    out = model.model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def llama():
    model = target("llama")
    return Spec(model, random_head(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_generate_token_for_token(name):
    model = target(name)
    wanted = plain_generate(model, prompt(), 24)
    spec = Spec(model, random_head(model))
    for tree in ("dynamic", "dynamic:depth=3,topk=4,nodes=9", "chain:4", "eagle", "2x3"):
        assert spec.configured(tree).generate(prompt(), max_new_tokens=24).token_ids == wanted
    assert spec.baseline().generate(prompt(), max_new_tokens=24).token_ids == wanted


@pytest.mark.parametrize("verifier", NAMES)
def test_greedy_is_the_same_under_every_verifier(llama, verifier):
    wanted = plain_generate(llama.target, prompt(), 24)
    spec = llama.configured(verifier=verifier, allow_lossy=True)
    assert spec.generate(prompt(), max_new_tokens=24).token_ids == wanted


@pytest.mark.parametrize("tree", ["sampled:nodes=12,depth=3", "auto:topk=4"])
@pytest.mark.parametrize("verifier", ["rrs-wo", "traversal", "optimal"])
def test_greedy_is_the_same_with_a_sampled_tree_and_one_chosen_by_its_cost(llama, verifier, tree):
    rates = {"1": (0.5, 0.2)}
    calibration = Calibration((0.0,) * 4, (0.0,) * 7, rates=rates)
    times = Cost((1, 4, 16), (1.0, 1.1, 1.4), 0.02)
    spec = Spec(llama.target, llama.head, tree, verifier, calibration=calibration, times=times)
    out = spec.generate(prompt(), max_new_tokens=24)
    assert out.token_ids == plain_generate(llama.target, prompt(), 24)
    assert out.stats.drafted[0] > 0


def test_a_head_that_knows_the_target_is_accepted_whole():
    """A target that repeats its last token, and a head whose features are the target's: every chain is kept."""
    model = random_model(CONFIGS["llama"]())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1))
    plain = Target(model)
    head = random_head(plain)
    with torch.no_grad():  # next feature = norm(embedding of the following token), as the target's is
        head.fc.weight.zero_()
        head.fc.weight[:, :32] = torch.eye(32)
        head.fc.bias.zero_()
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
    stats = Spec(plain, head, "chain:4").generate(prompt(), max_new_tokens=40).stats
    assert stats.accepted == [4] * 8
    assert stats.acceptance_length == 5
    assert stats.accepted_by_depth == [8, 8, 8, 8]
    assert stats.drafted == [8, 8, 8, 8]


def test_the_pairing_rule_refuses_biased_pairs():
    for name in STOCHASTIC:
        with pytest.raises(InputError, match="biases"):
            check_pair(DynamicTree(), scheme_by_name(name))
    with pytest.raises(InputError, match="at most 2 draws"):
        check_pair(policy("eagle"), scheme_by_name("spechub"))
    with pytest.raises(InputError, match="at most 1 draw"):
        check_pair(policy("2x2"), scheme_by_name("single"))
    for scheme in SCHEMES.values():
        check_pair(default_tree(scheme), scheme)


def test_the_text_ends_with_the_end_of_sequence_token(llama):
    wanted = plain_generate(llama.target, prompt(), 40)
    end = wanted[10]
    model = random_model(CONFIGS["llama"]())
    model.generation_config.eos_token_id = [end, 63]
    spec = Spec(Target(model), llama.head)
    first = wanted.index(end)
    for one in (spec.configured("eagle"), spec.configured("dynamic"), spec.baseline()):
        out = one.generate(prompt(), max_new_tokens=40)
        assert out.token_ids == wanted[: first + 1]
        assert out.stats.new_tokens == first + 1 == sum(out.stats.accepted) + out.stats.cycles


@pytest.mark.parametrize("new", [1, 2, 5, 17])
def test_max_new_tokens_is_exact(llama, new):
    out = llama.configured("eagle").generate(prompt(), temperature=1.0, max_new_tokens=new, seed=1)
    assert len(out.token_ids) == out.stats.new_tokens == new


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_context_length_ends_a_text(name):
    model = target(name)
    spec = Spec(model, random_head(model), "eagle")
    ids = prompt(length=120)
    out = spec.generate(ids, max_new_tokens=50)
    assert len(ids) + len(out.token_ids) <= model.context_length == 128
    assert out.token_ids == plain_generate(model, ids, 8)[: len(out.token_ids)]
    with pytest.raises(InputError, match="128 tokens, the target's context holds 128"):
        spec.generate(prompt(length=128))


def test_a_second_turn_reuses_the_first(llama):
    spec = llama.configured("eagle")
    first = spec.generate(prompt(), max_new_tokens=20)
    longer = [*prompt(), *first.token_ids, *prompt(length=5, seed=9)]
    second = spec.generate(longer, max_new_tokens=20)
    assert second.token_ids == plain_generate(llama.target, longer, 20)
    assert second.stats.cached_tokens >= len(prompt()) + len(first.token_ids) - 2
    other = spec.generate(prompt(seed=11), max_new_tokens=10)
    assert other.token_ids == plain_generate(llama.target, prompt(seed=11), 10)


def test_an_interrupted_stream_leaves_the_object_usable(llama):
    spec = llama.configured("eagle")
    wanted = plain_generate(llama.target, prompt(), 20)
    stream = spec.stream(prompt(), max_new_tokens=20)
    seen = [token for piece in itertools.islice(stream, 3) for token in piece.token_ids]
    assert seen == wanted[: len(seen)] == stream.output.token_ids
    assert spec.generate(prompt(), max_new_tokens=20).token_ids == wanted


@pytest.mark.parametrize("stage", ["forward_trees", "commit", "observe"])
def test_an_interrupt_within_a_cycle_leaves_the_object_usable(llama, monkeypatch, stage):
    spec = llama.configured("eagle")
    owner = {
        "forward_trees": Target,
        "commit": type(spec.decoder.cache),
        "observe": type(spec.decoder.drafter),
    }
    original, calls = getattr(owner[stage], stage), []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner[stage], stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(prompt(), max_new_tokens=20)
    assert spec.generate(prompt(), max_new_tokens=20).token_ids == plain_generate(llama.target, prompt(), 20)


def test_same_seed_same_text_and_another_seed_another(llama):
    def text(seed):
        return llama.configured("eagle", "rrs-wo").generate(prompt(), temperature=1.0, seed=seed).token_ids

    assert text(5) == text(5)
    assert text(5) != text(6)


def test_a_prompt_of_one_token_works(llama):
    assert llama.generate([5], max_new_tokens=9).token_ids == plain_generate(llama.target, [5], 9)


@pytest.mark.parametrize(
    ("ids", "options", "complaint"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "no tokenizer|empty"),
        ([64], {}, "outside the vocabulary"),
        ([5], {"temperature": -1.0}, "temperature is -1.0"),
        ([5], {"temperature": math.nan}, "temperature is nan"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"top_k": -2}, "top_k"),
        ([5], {"min_p": 2.0}, "min_p"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_input_is_one_line(llama, ids, options, complaint):
    with pytest.raises(InputError, match=complaint):
        llama.generate(ids, **options)


def test_stats_account_for_the_time(llama):
    stats = llama.configured("eagle").generate(prompt(), max_new_tokens=30).stats
    stages = sum(stats.seconds[name] for name in ("prefill", "draft", "target", "verify", "commit"))
    assert 0.5 * stats.seconds["total"] < stages <= stats.seconds["total"]
    assert stats.seconds["head"] <= stats.seconds["draft"]
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.accepted) / stats.cycles)


@pytest.mark.parametrize("verifier", [*NAMES, "baseline"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(verifier, temperature):
    model = Target(random_model(CONFIGS["llama"]()))
    spec = Spec(model, random_head(model))
    spec = spec.baseline() if verifier == "baseline" else spec.configured("chain:3", verifier, allow_lossy=True)
    model.model.lm_head.weight = torch.nn.Parameter(model.model.lm_head.weight * math.nan)
    with pytest.raises(InputError, match="not numbers"):
        spec.generate(prompt(), temperature=temperature, max_new_tokens=4, seed=1)
