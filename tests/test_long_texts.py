"""Long texts: rotary factors that change once with the length (longrope), and ones that end the context."""

import logging

import pytest
import torch
import transformers as hf
from commands import complains
from drafters import spec_of
from models import (
    GROUPED,
    LOGITS_TOLERANCE,
    MODELS,
    as_undrafted,
    close,
    plain_logits,
    rand,
    randn,
    random_eagle3,
    random_head,
    random_model,
    random_prefix,
    random_tree,
    tiny,
)
from reference import TEXT_PROB_TOLERANCE, enumerate_texts

from treespec import load
from treespec.api.spec import Spec
from treespec.heads.checkpoint import save_head
from treespec.heads.layers import Attention, Rotary
from treespec.model.rotary import find_longest_short_text
from treespec.model.support import find_context_length
from treespec.model.target import Target
from treespec.trees.tree import Drafts, Draws, TokenTree, build_root_tree, cut_below

ORIGINAL = 32  # positions; 128 by the configs
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "phi3": lambda: hf.Phi3Config(
        **GROUPED,
        pad_token_id=0,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=ROPE | FACTORS | {"rope_type": "longrope"},
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters=ROPE | FACTORS | {"rope_type": "longrope", "short_mscale": 1.0, "long_mscale": 1.3},
    ),
    "llama": lambda: hf.LlamaConfig(**GROUPED, rope_parameters=ROPE | FACTORS | {"rope_type": "longrope"}),
}
LENGTH_DEPENDENT = {
    "llama-dynamic": lambda: hf.LlamaConfig(
        **GROUPED | {"max_position_embeddings": ORIGINAL},
        rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0},
    ),
}
INDEXED = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"]  # attention by an index of 32 columns
ENDING = {name: (make, "rotary") for name, make in LENGTH_DEPENDENT.items()}
ENDING |= {name: (lambda name=name: tiny(MODELS[name]), "by an index") for name in INDEXED}
FIXED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def assert_equal_to_the_plain_model(target, length):
    """A tree behind a long text beside a shorter one; the long text is prefilled in chunks."""
    text = random_prefix(length=length)
    tree = random_tree()
    cache = target.build_cache()
    beside = target.build_cache()
    for part in text.split(10, 1):
        target.prefill(cache, part)
    target.prefill(beside, text[:, :5])
    cache.join([beside])
    long, short = target.forward_trees(cache, [tree, tree])
    exact = target.find_deepest(cache) or [length] * 2
    for out, before, deepest in ((long, text[0], exact[0]), (short, text[0, :5], exact[1])):
        for node in (tree.depth <= deepest).nonzero().flatten():
            path = tree.tokens[tree.ancestors[node]]
            plain = plain_logits(target.model, [*before.tolist(), *path.tolist()])[-1]
            close(out.logits[node], plain, LOGITS_TOLERANCE, LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", ENDING)
def test_a_line_says_where_the_context_ends_by_changing_rotary_factors(name, caplog):
    make, reason = ENDING[name]
    with caplog.at_level(logging.WARNING):
        target = Target(random_model(make()))
    assert target.context_length == ORIGINAL
    assert f"texts end at {ORIGINAL} tokens" in caplog.text
    assert reason in caplog.text
    assert_equal_to_the_plain_model(target, ORIGINAL - 5)  # the tree's leaves end at the last position
    spec = Spec(target, None)
    prompt = random_prefix(length=ORIGINAL - 6)[0].tolist()
    answer = spec.generate(prompt, max_new_tokens=100)
    assert len(prompt) + len(answer.token_ids) <= ORIGINAL
    with complains(f"context holds {ORIGINAL}"):
        spec.generate(random_prefix(length=ORIGINAL)[0].tolist())


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_rotary_factors_keep_the_whole_context(kind, caplog):
    config = hf.LlamaConfig(**GROUPED, rope_parameters=ROPE | FIXED[kind] | {"rope_type": kind})
    target = Target(random_model(config))
    assert target.context_length == 128
    assert "texts end" not in caplog.text
    assert_equal_to_the_plain_model(target, 100)


def test_llama_4_ends_where_its_attention_scales_by_column():
    length, why = find_context_length(hf.Llama4TextConfig(max_position_embeddings=1 << 20))
    assert length == 8192 - 1 - 1024
    assert "column" in why


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_a_partial_rotary_factor_of_a_head_rotates_as_in_transformers(rope):
    rope = rope | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = random_model(hf.NemotronConfig(**GROUPED, head_dim=8, rope_parameters=rope)).model
    theirs = model.layers[0].self_attn
    config = hf.LlamaConfig(**GROUPED, rope_parameters=rope)
    own = Attention(config, qkv_bias=False, in_features=32).float()
    own.load_state_dict(theirs.state_dict())
    x = randn(1, 5, 32)
    places = torch.arange(5)
    causal = torch.full((5, 5), float("-inf"), dtype=torch.float32).triu(1)[None, None]
    expected = theirs(x, model.rotary_emb(x, places[None]), causal)[0]
    torch.testing.assert_close(own(x, Rotary(config)(places, x.dtype), None, None), expected)


PROMPTS = {length: random_prefix(seed=length, length=length)[0].tolist() for length in (20, 30, 31, 32, 33, 34, 60)}


@pytest.fixture(scope="module", params=LONGROPE)
def target(request):
    return Target(random_model(LONGROPE[request.param]()))


@pytest.mark.parametrize("length", [ORIGINAL - 9, ORIGINAL - 2, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100])
def test_a_tree_around_the_change_has_the_plain_models_logits(target, length):
    assert target.context_length == 128
    assert_equal_to_the_plain_model(target, length)


def test_one_token_at_a_time_equals_a_forward_over_all_tokens(target):
    text = random_prefix(length=ORIGINAL + 6)[0]
    cache = target.build_cache()
    features = target.compute_features(text[None])[0]
    for place, token in enumerate(text):
        out = target.forward_tree(cache, build_root_tree(token[None]))
        cache.commit([[0]])
        close(
            out.logits[0],
            plain_logits(target.model, text[: place + 1].tolist())[-1],
            LOGITS_TOLERANCE,
            LOGITS_TOLERANCE,
        )
        close(out.features[0], features[place], LOGITS_TOLERANCE, LOGITS_TOLERANCE)


def text_of_whole_forwards(model, prompt, new):
    """The most likely tokens, each by a plain forward over the whole text before it."""
    text = list(prompt)
    for _ in range(new):
        text.append(int(plain_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def sources(target, folder, kinds=("eagle", "eagle3")):
    """Options of `load` for drafts of several kinds."""
    yield {"drafter": "suffix:tokens=4"}
    for kind in kinds:
        save_head({"eagle": random_head, "eagle3": random_eagle3}[kind](target), folder / kind)
        yield {"head": folder / kind, "tree": "levels:3x2x1x1"}


def test_greedy_text_across_the_change_is_the_plain_models(target, tmp_path):
    prompts = [PROMPTS[length] for length in (30, 31, 32, 60)]
    wanted = [text_of_whole_forwards(target.model, prompt, 8) for prompt in prompts]
    for source in sources(target, tmp_path):
        spec = load(target.model, **source)
        answers = [spec.generate(prompt, max_new_tokens=8, ignore_eos=True) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == wanted


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_the_models_own_generate_computes_the_keys_again_too(name):
    model = random_model(LONGROPE[name]())
    model.generation_config.eos_token_id = None
    for length in (20, 30, 32, 60):
        prompt = PROMPTS[length]
        own = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, pad_token_id=0)
        assert own[0, len(prompt) :].tolist() == text_of_whole_forwards(model, prompt, 14)


def test_texts_of_all_lengths_side_by_side_do_not_notice_each_other(target):
    spec = load(target.model, drafter="suffix:tokens=4")
    as_undrafted(spec, [*PROMPTS.values()], 14, batch=4)


def test_a_text_that_is_cut_short_has_short_factors_again(target):
    text = random_prefix(length=ORIGINAL + 8)
    cache = target.build_cache()
    target.prefill(cache, text)
    cache.rewind([10])
    target.prefill(cache, text[:, 10:15])
    out = target.forward_tree(cache, build_root_tree(text[0, 15:16]))
    close(out.logits[0], plain_logits(target.model, text[0, :16].tolist())[-1], LOGITS_TOLERANCE, LOGITS_TOLERANCE)


def test_chunks_of_a_long_prompt_are_computed_once_if_more_follow():
    target = Target(random_model(LONGROPE["phi3"]()))
    text = random_prefix(length=ORIGINAL + 8)
    cache = target.build_cache()
    forwarded = []
    target.tree_decoder.decoder.register_forward_pre_hook(
        lambda module, args, given: forwarded.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    for start in range(0, ORIGINAL + 8, 10):
        target.prefill(cache, text[:, start : start + 10], ahead=ORIGINAL - 2 - start)
    assert sum(forwarded) == ORIGINAL + 8


@pytest.mark.parametrize("verifier", ["gumbel", "rrs", "traversal"])
def test_seeded_draws_go_on_across_the_change(target, verifier, tmp_path):
    *_, source = sources(target, tmp_path, ["eagle"])
    spec = load(target.model, **source, verifier=verifier)
    how = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answer = spec.generate(PROMPTS[20], **how)
    assert len(answer.token_ids) == 24
    if verifier == "gumbel":
        assert answer.token_ids == spec.baseline().generate(PROMPTS[20], **how).token_ids


def test_a_tree_without_its_deepest_nodes_keeps_the_others_and_their_draws():
    """Nodes 0 to 8; depth 2 and more go: 4 to 8, and the draws of nodes 1 and 2."""
    tree = random_tree()
    nodes = torch.tensor([0, 1, 2])
    q = rand(3, 64)
    whole = TokenTree(tree.tokens, tree.parents, tree.depth, tree.ancestors, Drafts(nodes, q, Draws(nodes[:, None])))
    cut, numbers = cut_below(whole, 1)
    assert numbers == [0, 1, 2, 3]
    assert torch.equal(cut.tokens, tree.tokens[:4])
    assert cut.parents.tolist() == [-1, 0, 0, 0]
    assert torch.equal(cut.ancestors, tree.ancestors[:4, :4])
    assert cut.drafts.nodes.tolist() == [0]
    assert torch.equal(cut.drafts.q, q[:1])
    assert cut_below(whole, 0)[0].drafts is None


def test_nodes_out_of_order_are_renumbered():
    """A deep branch comes first: 0 - 1 - 2 - 3 and 0 - 4 - 5."""
    parents = torch.tensor([-1, 0, 1, 2, 0, 4])
    depth = torch.tensor([0, 1, 2, 3, 1, 2])
    tokens = torch.arange(6)
    ancestors = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents.tolist()[1:], 1):
        ancestors[node] |= ancestors[parent]
    cut, numbers = cut_below(TokenTree(tokens, parents, depth, ancestors), 2)
    assert numbers == [0, 1, 2, 4, 5]
    assert cut.parents.tolist() == [-1, 0, 1, 0, 3]
    assert torch.equal(cut.ancestors, ancestors[numbers][:, numbers])


def test_an_unknown_rotary_module_ends_texts_early_and_says_so(caplog):
    model = random_model(LONGROPE["phi3"]())
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: tuple(
        part * (1 + position_ids.shape[1]) for part in plain(x, position_ids)
    )
    target = Target.__new__(Target)
    with pytest.raises(Exception, match="cannot be"):
        target.__init__(model)
    assert f"texts end at {ORIGINAL} tokens: beyond, its rotary factors" in caplog.text


def test_factors_by_layer_type_count_too():
    rope = {"full_attention": ROPE | {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}
    assert find_longest_short_text(hf.PreTrainedConfig(max_position_embeddings=128, rope_parameters=rope)) == ORIGINAL
    assert find_longest_short_text(hf.PreTrainedConfig(max_position_embeddings=ORIGINAL, rope_parameters=rope)) is None


CUT = ["topk", "traversal", "block-optimal:threshold=0,extra=0", "rrs"]


@pytest.mark.parametrize("verifier", [*CUT, pytest.param("rrs-wo", marks=pytest.mark.slow)])
def test_cut_trees_leave_the_distribution_of_texts_as_it_is(verifier, monkeypatch):
    """By enumeration. Trees of two levels are cut to none, one or two by the length of the text alone."""
    spec = spec_of("model", "2x1" if verifier == "rrs" else "2x2", verifier)
    monkeypatch.setattr(
        spec.target, "find_deepest", lambda cache: [length % 3 for length in cache.lengths], raising=False
    )
    deviation, _ = enumerate_texts(spec)
    assert deviation < TEXT_PROB_TOLERANCE
