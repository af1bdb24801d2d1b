"""A step of an EAGLE head as one C call has the bits of the head's own modules."""

import numpy as np
import pytest
import torch
from models import CONFIGS, randn, random_head, random_model, seeded

from treespec.draft.drafter import Frontier
from treespec.draft.heads.host_levels import extend_mask, mask_committed_columns
from treespec.draft.heads.loading import build_proposer
from treespec.draft.vocabulary import restrict
from treespec.kernels import ops as kernels
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.target import Target

packed = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")


def build_packed_proposer(config="llama", dtype=torch.bfloat16, drafted=None):
    target = Target(random_model(CONFIGS[config]()).to(dtype))
    head = random_head(target).to(dtype)
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
        features = randn(length, 32, generator=generator).to(proposer.target.dtype)
        proposer.observe([features], [torch.randint(64, (length + 1,), generator=generator)])
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


@packed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafted", [None, torch.arange(10, 58, 3)])
def test_one_call_drafts_the_logits_of_the_modules(dtype, drafted):
    """The first 40 pairs are a prompt: observing it reads all but the last of them."""
    proposer = build_packed_proposer(dtype=dtype, drafted=drafted)
    tokens = 64 if drafted is None else len(drafted)
    frontiers = list(random_frontiers(tokens))
    lengths = (40, 1, 3, 9)
    found = draft_levels(proposer, frontiers, lengths)
    module_steps = type("WithoutOneCall", (type(proposer),), {"head_step": None})
    expected = draft_levels(module_steps(proposer.head, proposer.target), frontiers, lengths)
    assert proposer.head_step is not None
    assert len(found) == len(lengths) * (1 + len(frontiers))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


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
        row = randn(length, 32, generator=generator)
        features.append(row.to(proposer.target.dtype))
        tokens.append(torch.randint(64, (length + 1,), generator=generator))
    proposer.observe(features, tokens)


def random_frontier(generator, nodes):
    """Nodes below the first node of the frontier above."""
    if not nodes:
        return None
    return Frontier(torch.randint(16, (nodes,), generator=generator), torch.arange(nodes), 4)


@packed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafted", [None, torch.arange(10, 58, 3)])
def test_one_call_drafts_the_logits_of_several_sequences(dtype, drafted):
    proposer = build_packed_proposer(dtype=dtype, drafted=drafted)
    found = draft_batch_levels(proposer)
    module_steps = type("WithoutOneCall", (type(proposer),), {"head_step": None})
    expected = draft_batch_levels(module_steps(proposer.head, proposer.target))
    assert len(found) == 2 * (3 + 9)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@packed
@pytest.mark.parametrize("config", ["granite", "gemma3"])
def test_targets_that_scale_embeddings_or_cap_logits_take_the_modules(config):
    assert build_packed_proposer(config).head_step is None


@packed
def test_a_hook_on_the_head_runs():
    proposer = build_packed_proposer()
    calls = []
    proposer.head.fc.register_forward_hook(lambda *call: calls.append(call))
    draft_levels(proposer, list(random_frontiers(64)), (3,))
    assert len(calls) == 4


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


def draw(mask):
    """Each row of an additive float32 mask: x where it is 0, a point where it is the lowest number."""
    marks = {0.0: "x", torch.finfo(torch.float32).min: "."}
    return ["".join(marks[number] for number in row) for row in mask.view(np.float32).tolist()]
