"""Targets whose layers carry a state from token to token: chains, trees, batches and heads change no token."""

import copy
from functools import cache

import pytest
import torch
from commands import complains
from drafters import ARCHITECTURE_TOLERANCE
from models import (
    MODELS,
    as_undrafted,
    close,
    list_node_paths,
    plain_generate,
    plain_logits,
    prompt,
    randn,
    random_model,
    random_prefix,
    random_tree,
    seeded,
    tiny,
)
from training import save_tiny_model, small_run, write_data

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer
from treespec.model.recurrent.rows import list_linear_layers
from treespec.model.target import Target
from treespec.train.run import train

RECURRENT = {  # whether the mixers take several tokens behind a state
    "bamba": True,
    "falcon_h1": True,
    "granitemoehybrid": True,
    "jamba": False,
    "kimi_linear": True,
    "lfm2": True,
    "mamba": False,
    "mamba2": True,
    "nemotron_h": True,
    "olmo_hybrid": True,
    "qwen3_5": True,
    "qwen3_next": True,
    "zamba2": True,
    "zaya": True,
}
NEW = 12  # tokens
FAST = ("jamba", "nemotron_h", "qwen3_next")  # the rest are like these


@cache
def target(name):
    return Target(random_model(tiny(MODELS[name])))


@cache
def proposer(name):
    """A draft model near the target, so that some of its drafts are accepted."""
    near = copy.deepcopy(target(name).model)
    generator = seeded(5)
    with torch.no_grad():
        weight = near.get_output_embeddings().weight
        weight += 0.05 * randn(weight.shape, generator=generator)
    return ModelProposer(Target(near), target(name))


def alone(name, ids):
    """Greedy tokens of transformers' own decoding.

    By plain forwards over the whole text where token 0 would be taken for padding.
    """
    model = target(name)
    text = list(ids)
    if 0 not in ids:
        return plain_generate(model, ids, NEW)
    while len(text) < len(ids) + NEW and (text[-1] not in model.eos or len(text) == len(ids)):
        text.append(int(plain_logits(model.model, text)[-1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_tree_scores_as_its_paths_and_commit_equals_a_prefill(name):
    """The path 0 1 5 8 is no chain: the layers compute its states again."""
    model = target(name)
    tree = random_tree()
    text = random_prefix(length=9)
    path = [0, 1, 5, 8]
    assert model.tree_decoder.recurrent.continues == RECURRENT[name]
    cache = model.build_cache(capacity=4)
    again = model.build_cache()
    for part in text.split(4, 1):
        model.prefill(cache, part)
    logits = model.forward_tree(cache, tree).logits
    for node, nodes in list_node_paths(tree):
        alone = plain_logits(model.model, text[0].tolist() + tree.tokens[nodes].tolist())[-1]
        close(logits[node], alone, ARCHITECTURE_TOLERANCE, ARCHITECTURE_TOLERANCE)
    cache.commit([path])
    model.prefill(again, torch.cat([text, tree.tokens[path][None]], dim=1))
    following = random_tree(seed=7)
    ours = model.forward_tree(cache, following)
    fresh = model.forward_tree(again, following)
    close(ours.logits, fresh.logits, ARCHITECTURE_TOLERANCE, ARCHITECTURE_TOLERANCE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in RECURRENT])
def test_greedy_answers_are_one_token_decodings_own(name):
    """By chains and trees of a draft model that carries a state too, alone and two texts together."""
    model = target(name)
    prompts = [prompt(), prompt(length=12, seed=4)]
    wanted = [alone(name, ids) for ids in prompts]
    assert model.tree_decoder.recurrent
    accepted = 0
    for tree in ("chain:3", "2x2"):
        spec = Spec(model, proposer(name).new(), tree)
        output = spec.generate(prompts[0], max_new_tokens=NEW)
        assert output.token_ids == wanted[0]
        both = spec.generate(prompts, max_new_tokens=NEW, batch=2)
        assert [one.token_ids for one in both] == wanted
        accepted += sum(output.stats.accepted)
    assert accepted > 0


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_commit_reads_no_weights_of_linear_layers(name):
    """The states of the path 0 1 5 8 from what the forward computed: the weights are gone by then."""
    model = Target(random_model(tiny(MODELS[name])))
    tree = random_tree()
    text = random_prefix(length=9)
    path = [0, 1, 5, 8]
    cache = model.build_cache()
    again = model.build_cache()
    model.prefill(cache, text)
    model.prefill(again, torch.cat([text, tree.tokens[path][None]], dim=1))
    model.forward_tree(cache, tree)
    for mixer in model.tree_decoder.recurrent.mixers:
        for layer in list_linear_layers(mixer.module):
            layer.weight.fill_(torch.nan)
    cache.commit([path])
    for ours, fresh in zip(cache.states[0], again.states[0], strict=True):
        for key, wanted in fresh.items():
            close(ours[key], wanted, ARCHITECTURE_TOLERANCE, ARCHITECTURE_TOLERANCE)


@pytest.mark.parametrize("name", [pytest.param("qwen3_next", marks=pytest.mark.slow), "mamba"])
def test_texts_enter_and_leave_a_batch_with_their_states(name):
    """Of five prompts two at a time; one is a single token, another begins as the one before it."""
    model = target(name)
    first = prompt()
    prompts = [first, [7], prompt(length=12, seed=4), [*first, 9, 11], [*first, 9, 11, 5]]
    spec = Spec(model, proposer(name).new(), "2x2")
    wanted = [alone(name, ids) for ids in prompts]
    outputs = spec.generate(prompts, max_new_tokens=NEW, batch=2)
    assert [output.token_ids for output in outputs] == wanted
    assert [spec.generate(ids, max_new_tokens=NEW).token_ids for ids in prompts[-2:]] == wanted[-2:]
    samples = spec.generate(first, n=3, max_new_tokens=NEW)
    assert [output.token_ids for output in samples] == wanted[:1] * 3


def test_a_text_that_goes_on_reuses_the_states_after_its_prompt():
    model = target("qwen3_next")
    first = prompt(length=12)
    spec = Spec(model, proposer("qwen3_next").new(), "2x2")
    answer = spec.generate(first, max_new_tokens=NEW).token_ids
    longer = [*first, *answer, 5, 6]
    output = spec.generate(longer, max_new_tokens=NEW)
    assert output.token_ids == alone("qwen3_next", longer)
    assert output.stats.cached_tokens == len(first) - 1


@pytest.mark.parametrize(
    "name, reason",
    {
        "minimax": "state in a place",
        "xlstm": "state in a place",
        "inkling_text": "counts columns",
        "recurrent_gemma": "outside of the cache",
        "rwkv": "outside of the cache",
    }.items(),
)
def test_what_keeps_its_state_elsewhere_is_refused_by_name(name, reason):
    model = random_model(tiny(MODELS[name]))
    with complains(reason) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("mamba", marks=pytest.mark.slow)])
def test_a_head_trains_on_a_recurrent_target_and_changes_no_token(name, tmp_path):
    folder = save_tiny_model(name, tmp_path / "target")
    config = small_run(folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head", max_steps=2)
    train(config)
    spec = load(str(folder), f"{tmp_path}/head", tree="2x2", dtype="float32")
    assert spec.target.tree_decoder.recurrent
    prompts = ["the user asks", "the assistant answers the question the user asks"]
    output, _ = as_undrafted(spec, prompts, 10, batch=2)
    assert sum(output.stats.drafted) > 0
    plain = Target.load(str(folder), dtype="float32").model
    text = spec.encode(prompts[0])
    for token in output.token_ids:
        logits = plain(input_ids=torch.tensor([text])).logits[0, -1]
        assert logits.max() - logits[token] < 1e-4
        text.append(token)


@pytest.mark.parametrize("drafter", ["suffix", "lookahead:window=3,ngram=3"])
def test_trees_from_the_text_go_through_recurrent_layers(tmp_path, drafter):
    folder = save_tiny_model("lfm2", tmp_path / "target")
    spec = load(str(folder), drafter=drafter, dtype="float32")
    prompts = ["the user asks and the user asks and the user", "the assistant answers"]
    as_undrafted(spec, prompts, 10, batch=2)
