"""Heads of masks draft as a second reading of their authors' formulas: tests/reference_heads."""

from functools import cache

import pytest
import torch
from drafters import BLOCK_TEXT, DRAFT_PATHS, draft_paths
from head_files import write_head
from models import GROUPED, random_model
from reference_heads.block_files import BLOCK_FILES, IDS
from reference_heads.parts import compare
from transformers import LlamaConfig

from treespec.draft.heads.block import BlockProposer, ConditionalProposer
from treespec.draft.heads.loading import load_trained_head
from treespec.model.target import Target

TOLERANCE = 1e-5


@cache
def build_target():
    return Target(random_model(LlamaConfig(**GROUPED | {"num_hidden_layers": 8})).double())


@cache
def read_features():
    """[8, A * H] the aux layers at every token but the last, by transformers alone."""
    with torch.no_grad():
        states = build_target().model(BLOCK_TEXT[None], output_hidden_states=True).hidden_states
    return torch.cat([states[number + 1][0, :-1] for number in IDS], dim=-1)


def read_ends():
    """The target's embedding and its output layer."""
    model = build_target().model
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@torch.no_grad()
def draft_by_head(directory):
    """[8, V] logits of treespec after each of `DRAFT_PATHS`."""
    target = build_target()
    head = load_trained_head(str(directory), target)
    features = target.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]
    proposer = BlockProposer(head, target)
    if head.kind != "dflash":
        proposer = ConditionalProposer(head, target)
    return draft_paths(proposer, target, BLOCK_TEXT[1:], features)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCK_FILES)
def test_a_block_head_drafts_as_a_second_reading_says(name, tmp_path):
    file = BLOCK_FILES[name]
    tensors = file.fill()
    found = draft_by_head(write_head(tmp_path / "head", file.config, tensors))
    block = file.build_block(tensors, read_features(), int(BLOCK_TEXT[-1]), *read_ends())
    for row, path in zip(found, DRAFT_PATHS, strict=True):
        assert compare(row, file.draft(block, file.name_path(path))) < TOLERANCE, path
