"""A step of an EAGLE head as one C call has the bits of the head's own modules."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf
from head_files import build_eagle31
from models import CONFIGS, GROUPED, randn, random_head, random_model, seeded

from treespec.draft.drafter import Frontier
from treespec.draft.heads import own_tokens
from treespec.draft.heads.base import MAX_WAITING_PAIRS
from treespec.draft.heads.host_levels import apply_window, extend_mask, mask_committed_columns
from treespec.draft.heads.host_step import log_refusal
from treespec.draft.heads.loading import build_proposer
from treespec.draft.vocabulary import restrict
from treespec.kernels import ops as kernels
from treespec.model.cpu.eight_bits import quantize_model
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.target import Target

packed = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")


def build_eagle3(target, **parts):
    return build_eagle31(parts, target, drafted=None)


# Heads all of whose parts the call computes.
HEADS = {
    "eagle": random_head,
    "eagle3": build_eagle3,
    "eagle3.1": partial(build_eagle3, fc_norm=True, norm_output=True),
    "speculators": partial(build_eagle3, norm_before_fc=True, norm_before_residual=True, qk_norm=True),
    "biases, the target's output": partial(build_eagle3, qkv_bias=True, own_output=False),
}
DRAFTED = torch.arange(10, 58, 3)


def build_packed_proposer(build_head=random_head, config="llama", dtype=torch.bfloat16, drafted=None):
    target = Target(random_model(CONFIGS[config]()).to(dtype))
    head = build_head(target).to(dtype)
    if drafted is not None:
        restrict(head, target, drafted)
    for module in (target.model, head):
        pack(module)
        fuse(module)
    return build_proposer(head, target)


def draft_levels(proposer, frontiers, lengths):
    """The draft logits of each cycle's levels: one cycle for each number of newly observed pairs."""
    generator = seeded(4)
    proposer = proposer.new()
    logits = []
    for length in lengths:
        observe_random_pairs(proposer, [length], generator)
        logits += proposer.begin(torch.tensor([5]))
        for frontier in frontiers:
            logits += proposer.extend([frontier])
    return logits


def random_frontiers(tokens, sizes=(3, 4, 2), topk=2):
    generator = seeded(6)
    above = 1
    for size in sizes:
        slots = torch.randperm(above * topk, generator=generator)[:size]
        yield Frontier(torch.randint(tokens, (len(slots),), generator=generator), slots, topk)
        above = len(slots)


def run_as_modules(proposer):
    return type("WithoutOneCall", (type(proposer),), {"head_step": None})(proposer.head, proposer.target)


@packed
@pytest.mark.parametrize("build_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafted", [None, DRAFTED])
def test_one_call_drafts_the_logits_of_the_modules(build_head, dtype, drafted):
    """The first 40 pairs are a prompt: all but the last of them are read before the call."""
    proposer = build_packed_proposer(build_head, dtype=dtype, drafted=drafted)
    tokens = 64 if drafted is None else len(drafted)
    frontiers = list(random_frontiers(tokens))
    lengths = (40, 1, 3, 9)
    found = draft_levels(proposer, frontiers, lengths)
    expected = draft_levels(run_as_modules(proposer), frontiers, lengths)
    assert proposer.head_step is not None
    assert len(found) == len(lengths) * (1 + len(frontiers))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@packed
def test_on_a_cpu_a_prompt_is_read_when_the_first_drafts_are_asked_for():
    proposer = build_packed_proposer()
    observe_random_pairs(proposer, [40], seeded(4))
    assert proposer.cache.lengths == [0]
    proposer.begin(torch.tensor([5]))
    assert proposer.cache.lengths == [40]
    assert proposer.host_levels is not None
    observe_random_pairs(proposer, [MAX_WAITING_PAIRS + 1], seeded(4))
    assert proposer.cache.lengths == [40 + MAX_WAITING_PAIRS]


def draft_batch_levels(proposer):
    """The draft logits of three sequences. Their levels have different numbers of nodes, some none."""
    generator = seeded(4)
    batch = []
    for length in (40, 7, 1):
        batch.append(proposer.new())
        observe_random_pairs(batch[-1], [length], generator)
    first, *others = batch
    first.join(others)
    levels = [[random_frontier(generator, nodes) for nodes in sizes] for sizes in LEVEL_SIZES]
    logits = []
    for lengths in [(1, 1, 1), (3, 1, 2)]:
        observe_random_pairs(first, lengths, generator)
        logits += first.begin(torch.tensor([5, 6, 7]))
        for frontiers in levels:
            logits += first.extend(frontiers)
    return logits


LEVEL_SIZES = [(1, 1, 1), (3, 1, 2), (2, 0, 4)]


def observe_random_pairs(proposer, lengths, generator):
    features = []
    tokens = []
    for length in lengths:
        row = randn(length, proposer.head.feature_size, generator=generator)
        features.append(row.to(proposer.target.dtype))
        tokens.append(torch.randint(64, (length + 1,), generator=generator))
    proposer.observe(features, tokens)


def random_frontier(generator, nodes):
    """Nodes below the first node of the frontier above."""
    if not nodes:
        return None
    return Frontier(torch.randint(16, (nodes,), generator=generator), torch.arange(nodes), 4)


@packed
@pytest.mark.parametrize("build_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_drafts_the_logits_of_several_sequences(build_head, dtype):
    proposer = build_packed_proposer(build_head, dtype=dtype, drafted=DRAFTED)
    found = draft_batch_levels(proposer)
    expected = draft_batch_levels(run_as_modules(proposer))
    assert len(found) == 2 * (3 + 9)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@packed
@pytest.mark.parametrize("name", ["eagle", "biases, the target's output"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_drafts_the_texts_own_tokens_as_the_modules(name, dtype, monkeypatch):
    """Each of three texts has four, behind the 16 of the vocabulary; the frontiers are of all 20."""
    monkeypatch.setattr(own_tokens, "OWN_SHARE", 4)
    proposer = build_packed_proposer(HEADS[name], dtype=dtype, drafted=DRAFTED)
    modules = run_as_modules(proposer)
    frontiers = list(random_frontiers(20))
    found = draft_levels(proposer, frontiers, (40, 3, 9)) + draft_batch_levels(proposer)
    expected = draft_levels(modules, frontiers, (40, 3, 9)) + draft_batch_levels(modules)
    for one, other in zip(found, expected, strict=True):
        assert one.shape[1] == 20
        assert torch.equal(one, other)


# By the longest text of 40 pairs: all in the window, just, not the last level, and much longer texts than windows.
WINDOWS = [60, 56, 55, 42, 41, 9, 3, 2, 1]


@packed
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("build_head", [random_head, build_eagle3])
def test_one_call_drafts_within_a_window_as_the_modules(build_head, window):
    proposer = build_packed_proposer(build_head, dtype=torch.float32, drafted=DRAFTED)
    frontiers = list(random_frontiers(len(DRAFTED)))
    lengths = (40, 1, 3, 9)
    whole = draft_levels(proposer, frontiers, lengths)
    batch = draft_batch_levels(proposer)
    proposer.head.attentions[0].window = window
    proposer = build_proposer(proposer.head, proposer.target)
    assert proposer.head_step.window == window
    modules = run_as_modules(proposer)
    found = draft_levels(proposer, frontiers, lengths)
    for one, other in zip(found, draft_levels(modules, frontiers, lengths), strict=True):
        assert torch.equal(one, other)
    found_batch = draft_batch_levels(proposer)
    for one, other in zip(found_batch, draft_batch_levels(modules), strict=True):
        assert torch.equal(one, other)

    # The last level of the longest text stands at position 55.
    fits = [torch.equal(one, other) for one, other in zip(found, whole, strict=True)]
    assert fits[-1] == (window >= 56)
    assert fits[0] == (window >= 40)
    assert all(map(torch.equal, found_batch, batch)) == (window >= 47)


# Heads with a part that the call does not compute, and what the log says.
REFUSED = {
    "scaled embeddings": (partial(build_packed_proposer, config="gemma3"), "it multiplies embeddings by"),
    "scaled logits": (partial(build_packed_proposer, config="cohere"), "the output layer does more"),
    "two layers": (partial(build_packed_proposer, partial(build_eagle3, num_hidden_layers=2)), "it has 2 layers"),
    "half precision": (partial(build_packed_proposer, dtype=torch.float16), "float16 is no dtype of the kernels"),
}


@packed
@pytest.mark.parametrize("build, reason", REFUSED.values(), ids=REFUSED)
def test_a_head_with_other_parts_runs_its_modules(build, reason, caplog):
    log_refusal.cache_clear()
    caplog.set_level("INFO", "treespec")
    assert build().head_step is None
    assert reason in caplog.text


@packed
@pytest.mark.parametrize("name", ["fc", "midlayer", "midlayer.mlp.up_proj", "midlayer.hidden_norm", "norm", "lm_head"])
def test_a_hook_on_a_part_of_the_head_runs(name):
    """It is called at every level, that of `fc` once for the pairs."""
    proposer = build_packed_proposer(build_eagle3)
    calls = []
    proposer.head.get_submodule(name).register_forward_hook(lambda *call: calls.append(call))
    draft_levels(proposer, list(random_frontiers(64)), (3,))
    assert len(calls) == (1 if name == "fc" else 4)


def test_a_node_of_a_level_sees_what_its_parent_sees_and_itself():
    """The drawing of `extend_mask`."""
    nothing = np.empty((1, 1, 0), dtype=np.float32)
    level_1 = extend_mask(nothing, [np.array([0, 0])], torch.float32)
    level_2 = extend_mask(level_1, [np.array([0, 0, 1])], torch.float32)
    assert draw(level_1[0]) == ["x.", ".x"]
    assert draw(level_2[0]) == ["x.x..", "x..x.", ".x..x"]


def test_committed_columns_are_masked_from_the_end_of_the_shortest_sequence_on():
    """The drawing of `mask_committed_columns`."""
    mask = mask_committed_columns(np.array([3, 1, 2]), torch.float32)
    assert draw(mask[:, 0]) == ["xx", "..", "x."]


def test_a_window_leaves_out_the_columns_before_the_first_that_a_node_sees():
    """The drawing of `apply_window`; then texts of 5 and 3 columns, the second with a node at a time of its own."""
    nothing = np.empty((1, 1, 0), dtype=np.float32)
    level = extend_mask(nothing, [np.array([0, 0])], torch.float32)
    mask, first = apply_window(level, 6, np.array([4]), 3, torch.float32)
    assert first == 2
    assert draw(mask[0]) == ["x.", ".x"]
    texts = extend_mask(mask_committed_columns(np.array([5, 3]), torch.float32), [np.array([0])] * 2, torch.float32)
    mask, first = apply_window(texts, 6, np.array([5, 3]), 3, torch.float32)
    assert first == 1
    assert draw(mask[:, 0]) == ["..xxx", "xx..x"]
    assert apply_window(texts, 6, np.array([5, 3]), 6, torch.float32) == (texts, 0)


@packed
@pytest.mark.parametrize("build_head", [random_head, build_eagle3], ids=["eagle", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_reads_embeddings_in_blocks_as_the_modules(build_head, dtype):
    """Of a target in eight bits, whose embedding has the rows of its output layer."""
    model = random_model(hf.LlamaConfig(**GROUPED | {"hidden_size": 64, "intermediate_size": 96})).to(dtype)
    model.lm_head.weight = model.model.embed_tokens.weight
    quantize_model(model)
    target = Target(model)
    head = build_head(target).to(dtype)
    head.embed_tokens = None  # as in a checkpoint without one
    head.share_embedding(model.get_input_embeddings())
    for module in (model, head):
        pack(module)
        fuse(module)
    proposer = build_proposer(head, target)
    assert isinstance(proposer.head_step.weights.embedding, kernels.PackedWeight)
    frontiers = list(random_frontiers(64))
    found = draft_levels(proposer, frontiers, (40, 1, 3))
    expected = draft_levels(run_as_modules(proposer), frontiers, (40, 1, 3))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def draw(mask):
    """Each row of an additive float32 mask: x where it is 0, a point where it is the lowest number."""
    marks = {0.0: "x", torch.finfo(torch.float32).min: "."}
    return ["".join(marks[number] for number in row) for row in mask.view(np.float32).tolist()]
