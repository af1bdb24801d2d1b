"""Decoding changes no token: greedy to the token, alone and in a batch, and it ends where a text ends."""

import math
import time

import pytest
import torch
from commands import complains
from models import (
    CONFIGS,
    close,
    plain_generate,
    prompt,
    prompts_of_lengths,
    random_head,
    random_model,
    seeded,
    target,
    what,
)
from reference import STOCHASTIC

from treespec.api.spec import Spec
from treespec.draft.auto.cost import CycleCost
from treespec.draft.calibration import Calibration
from treespec.draft.pairing import check_fit, choose_default_tree
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.trees.dynamic import DynamicTree
from treespec.trees.layout import get_layout
from treespec.trees.policy import parse_policy
from treespec.trees.static import StaticTree, build_chain
from treespec.trees.tree import TokenTree
from treespec.verify.facts import VERIFIER_NAMES
from treespec.verify.registry import SCHEMES, load_scheme

TIMED = {"calibration": Calibration(), "times": CycleCost((1, 8, 64), (1e-3, 1.2e-3, 4e-3), 2e-4)}
TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def alone(spec, texts, seed=0, **options):
    """Each text by an object of its own."""
    fresh = [Spec(spec.target, spec.head, spec.policy, spec.verifier, **TIMED) for _ in texts]
    return [
        one.generate(text, seed=seed + i, **options) for i, (one, text) in enumerate(zip(fresh, texts, strict=True))
    ]


@pytest.fixture(scope="module")
def llama():
    return Spec(target("llama"), random_head(target("llama")), **TIMED)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_generate_token_for_token(name):
    """A tree that grows decodes one text, one of a fixed shape texts of unequal length; answers outgrow a window."""
    model = target(name)
    texts = prompts_of_lengths()
    wanted = [plain_generate(model, text, 9) for text in texts]
    spec = Spec(model, random_head(model))
    grown = spec.configured("dynamic:depth=3,topk=4,nodes=9")
    assert grown.generate(texts[0], max_new_tokens=9).token_ids == wanted[0]
    for one in (spec.configured("2x3"), spec.baseline()):
        assert [output.token_ids for output in one.generate(texts, max_new_tokens=9)] == wanted


@pytest.mark.parametrize("tree, verifier", [*((None, name) for name in VERIFIER_NAMES), ("auto:topk=4", "auto")])
def test_greedy_is_the_same_under_every_verifier_and_tree(llama, tree, verifier):
    out = llama.configured(tree, verifier, allow_lossy=True).generate(prompt(), max_new_tokens=14)
    assert out.token_ids == plain_generate(llama.target, prompt(), 14)
    assert sum(out.stats.drafted) > 0


@pytest.mark.parametrize(
    "tree, verifier",
    {
        "dynamic:depth=3,topk=4,nodes=9": "topk",
        "auto:nodes=16": "topk",
        "eagle": "rrs-wo",
        "chain:4": "block",
        "2x3": "traversal",
        "3x2": "greedy",
    }.items(),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_equals_each_text_alone_for_every_kind_of_tree(llama, verifier, tree, temperature):
    """With the same seeds sampled texts are the same too, as their draws are their own; two at a time take turns."""
    spec = llama.configured(tree, verifier)
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 5}
    wanted = what(alone(spec, prompts_of_lengths(), **options))
    for batch in (2, 4):
        assert what(spec.generate(prompts_of_lengths(), batch=batch, **options)) == wanted


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
        head.fc.weight[:, :32] = torch.eye(32, dtype=torch.float32)
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
        with complains("biases"):
            check_fit(DynamicTree(), load_scheme(name))
    with complains("at most 2 draws"):
        check_fit(parse_policy("eagle"), load_scheme("spechub"))
    with complains("at most 1 draw"):
        check_fit(parse_policy("2x2"), load_scheme("single"))
    for scheme in SCHEMES.values():
        check_fit(choose_default_tree(scheme, None), scheme)


def test_a_scheme_of_one_draw_without_a_tree_of_its_own_drafts_a_chain():
    scheme = type("OneDraw", (type(load_scheme("rrs")),), {"max_draws": 1})()
    tree = choose_default_tree(scheme, None)
    check_fit(tree, scheme)
    assert tree == build_chain(tree.max_depth)


@pytest.mark.parametrize("name", ["llama", "mistral-window-6", "gpt2", "opt"])
def test_the_context_ends_texts_at_different_times(name):
    """127 of 128 tokens end in the first cycle, when the others have just begun."""
    model = target(name)
    spec = Spec(model, random_head(model), "eagle")
    texts = prompts_of_lengths((127, 120, 2, 101))
    outputs = spec.generate(texts, max_new_tokens=20)
    assert what(outputs) == what(alone(spec, texts, max_new_tokens=20))
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths[0] == 1
    assert lengths[1] <= 8
    assert max(lengths) == 20


def test_texts_end_with_their_own_end_of_sequence_token(llama):
    plain = llama.baseline().generate(prompts_of_lengths(), max_new_tokens=30, ignore_eos=True)
    ends = [output.token_ids[place] for output, place in zip(plain, (0, 9, 20, 3), strict=True)]
    model = random_model(CONFIGS["llama"]())
    model.generation_config.eos_token_id = ends
    spec = Spec(Target(model), llama.head, "2x3")
    outputs = spec.generate(prompts_of_lengths(), max_new_tokens=30)
    assert what(outputs) == what(alone(spec, prompts_of_lengths(), max_new_tokens=30))
    assert len({len(output.token_ids) for output in outputs}) > 2


def test_a_batch_leaves_the_object_as_usable_as_a_text_does(llama):
    """One text after a batch reuses the last to end; an interrupted batch is forgotten."""
    spec = llama.configured("eagle")
    options = {"max_new_tokens": 12}
    wanted = what(alone(spec, prompts_of_lengths(), **options))
    assert what(spec.generate(prompts_of_lengths(), **options)) == wanted
    assert what([spec.generate(prompts_of_lengths()[1], **options)]) == wanted[1:2]
    texts = [spec.request(prompt, **options) for prompt in prompts_of_lengths()]
    running = spec.decoder.run(texts, batch=3)
    for _ in range(9):
        next(running)
    running.close()
    assert what([spec.generate(prompts_of_lengths()[3], **options)]) == wanted[3:]
    assert what(spec.generate(prompts_of_lengths(), **options)) == wanted


def test_a_text_takes_the_row_of_another_without_copying_the_rest(llama, monkeypatch):
    """With nothing to draft rows neither leave nor join while texts wait."""
    spec = llama.baseline()
    options = {"max_new_tokens": 9}
    texts = prompts_of_lengths((7, 60, 1, 19, 2, 1, 33))
    wanted = what(alone(spec, texts, **options))
    copied = []
    for name in ("join", "select"):
        original = getattr(TreeCache, name)
        monkeypatch.setattr(TreeCache, name, lambda *given, how=original: (copied.append(given[1]), how(*given)))
    requests = [
        spec.request(text, max_new_tokens=most) for text, most in zip(texts, (3, 9, 4, 9, 5, 2, 9), strict=True)
    ]
    answers = {text: [] for text in requests}
    for text, piece in spec.decoder.run(requests, batch=3):
        answers[text] += piece.token_ids
    assert list(answers.values()) == [ids[: len(mine)] for (ids, _), mine in zip(wanted, answers.values(), strict=True)]
    assert len(copied) <= 3  # two texts join the first, and leave it in the end


def test_shares_of_the_time_add_up_to_the_clock(llama):
    started = time.perf_counter()
    outputs = llama.configured("eagle").generate(prompts_of_lengths(), max_new_tokens=12, batch=3)
    spent = time.perf_counter() - started
    assert 0.5 * spent < sum(output.stats.seconds["total"] for output in outputs) < spent
    for output in outputs:
        stages = sum(output.stats.seconds[name] for name in ("prefill", "draft", "target", "verify", "commit"))
        assert 0 < stages <= output.stats.seconds["total"]


@pytest.mark.parametrize("verifier", [*VERIFIER_NAMES, "baseline"])
@pytest.mark.parametrize("temperature, cycles", [(0.0, 0), (1.0, 0), (0.0, 2)])
def test_logits_that_are_not_numbers_are_an_error(verifier, temperature, cycles):
    """cycles: that go well before."""
    model = Target(random_model(CONFIGS["llama"]()))
    spec = Spec(model, random_head(model))
    spec = spec.baseline() if verifier == "baseline" else spec.configured("chain:3", verifier, allow_lossy=True)
    pieces = spec.stream(prompt(), temperature=temperature, max_new_tokens=20, seed=1)
    for _ in range(cycles):
        next(pieces)
    model.model.lm_head.weight = torch.nn.Parameter(model.model.lm_head.weight * math.nan)
    with complains("not numbers"):
        list(pieces)


@pytest.mark.parametrize(
    "complaint, texts",
    {
        "prompt 2 of 2: the prompt is empty": [[5], []],
        "prompt 1 of 2: the prompt is empty": [[], [5]],
        "prompt 3 of 3: token id 64": [[5], [6], [64]],
        "prompt 1 of 2: the prompt has 128 tokens": [[5] * 128, [5]],
        "prompt 2 of 2: the target has no tokenizer": [[5], "word"],
    }.items(),
)
def test_a_bad_prompt_is_named(llama, texts, complaint):
    with complains(complaint):
        llama.generate(texts)
    with complains("batch is 0"):
        llama.generate([[5], [6]], batch=0)


SHAPES = [StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0))), StaticTree(((0,),)), StaticTree(((0,), (0, 0), (0, 1)))]
PATHS = [[0, 2, 4, 5], [0], [0, 1, 3]]


def trees(seed):
    generator = seeded(seed)
    shapes = [get_layout(shape, torch.device("cpu")) for shape in SHAPES]
    tokens = [torch.randint(3, 64, (shape.size,), generator=generator) for shape in SHAPES]
    return [TokenTree(t, s.parents, s.depth, s.ancestors) for t, s in zip(tokens, shapes, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_forward_over_ragged_trees_equals_a_forward_of_each(name):
    """Twice, with commits between that differ in number, then without the first text."""
    model = target(name)
    texts = prompts_of_lengths((9, 2, 30))
    caches = []
    for text in texts:
        caches.append(model.build_cache(capacity=4))
        model.prefill(caches[-1], torch.tensor([text]))
    caches[0].join(caches[1:])
    rows = [0, 1, 2]
    for seed in range(3):
        if seed == 2:
            rows = [1, 2]
            caches[0].select(rows)
        grown = [trees(seed)[row] for row in rows]
        for row, tree, out in zip(rows, grown, model.forward_trees(caches[0], grown), strict=True):
            fresh = model.build_cache()
            model.prefill(fresh, torch.tensor([texts[row]]))
            wanted = model.forward_tree(fresh, tree)
            close(out.logits, wanted.logits, TOLERANCE, TOLERANCE)
            close(out.features, wanted.features, TOLERANCE, TOLERANCE)
            texts[row] = texts[row] + tree.tokens[PATHS[row]].tolist()
        caches[0].commit([PATHS[row] for row in rows])
