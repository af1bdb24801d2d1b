"""Texts go on where rotary factors change once with their length, and end where they change with every token."""

import logging

import pytest
import torch
import transformers as hf
from equality import close
from models import GROUPED, random_model
from refusals import complains
from test_target import TOLERANCE, plain_logits, prefix, random_tree
from tiny_configs import MODELS, tiny

from treespec.api.spec import Spec
from treespec.heads.layers import Attention, Rotary
from treespec.model.support import context_length
from treespec.model.target import Target

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
    """A tree behind so many tokens, prefilled in chunks, beside a shorter text."""
    text = prefix(length=length)
    tree = random_tree()
    cache = target.new_cache()
    beside = target.new_cache()
    for part in text.split(10, 1):
        target.prefill(cache, part)
    target.prefill(beside, text[:, :5])
    cache.join([beside])
    long, short = target.forward_trees(cache, [tree, tree])
    exact = target.deepest(cache) or [length] * 2
    for out, before, deepest in ((long, text[0], exact[0]), (short, text[0, :5], exact[1])):
        for node in (tree.depth <= deepest).nonzero().flatten():
            path = tree.tokens[tree.ancestors[node]]
            plain = plain_logits(target.model, [*before.tolist(), *path.tolist()])[-1]
            close(out.logits[node], plain, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("name", ENDING)
def test_the_context_ends_where_a_forward_depends_on_its_length_and_a_line_says_so(name, caplog):
    make, reason = ENDING[name]
    with caplog.at_level(logging.WARNING):
        target = Target(random_model(make()))
    assert target.context_length == ORIGINAL
    assert f"texts end at {ORIGINAL} tokens" in caplog.text
    assert reason in caplog.text
    assert_equal_to_the_plain_model(target, ORIGINAL - 5)  # the tree's leaves end at the last position
    spec = Spec(target, None)
    prompt = prefix(length=ORIGINAL - 6)[0].tolist()
    answer = spec.generate(prompt, max_new_tokens=100)
    assert len(prompt) + len(answer.token_ids) <= ORIGINAL
    with complains(f"context holds {ORIGINAL}"):
        spec.generate(prefix(length=ORIGINAL)[0].tolist())


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_rotary_factors_keep_the_whole_context(kind, caplog):
    config = hf.LlamaConfig(**GROUPED, rope_parameters=ROPE | FIXED[kind] | {"rope_type": kind})
    target = Target(random_model(config))
    assert target.context_length == 128
    assert "texts end" not in caplog.text
    assert_equal_to_the_plain_model(target, 100)


def test_llama_4_ends_where_its_attention_scales_by_column():
    length, why = context_length(hf.Llama4TextConfig(max_position_embeddings=1 << 20))
    assert length == 8192 - 1 - 1024
    assert "column" in why


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_a_head_with_a_partial_rotary_factor_turns_that_part_alone_as_transformers_does(rope):
    rope = rope | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = random_model(hf.NemotronConfig(**GROUPED, head_dim=8, rope_parameters=rope)).model
    theirs = model.layers[0].self_attn
    config = hf.LlamaConfig(**GROUPED, rope_parameters=rope)
    own = Attention(config, qkv_bias=False, in_features=32)
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 5, 32)
    places = torch.arange(5)
    causal = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    expected = theirs(x, model.rotary_emb(x, places[None]), causal)[0]
    torch.testing.assert_close(own(x, Rotary(config)(places, x.dtype), None, None), expected)
