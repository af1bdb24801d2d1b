"""DFlash and P-EAGLE directories of other projects, built by hand: each drafts as the head that it was built from."""

import pytest
import torch
from commands import complains
from drafters import build_dflash, draft_block
from head_files import BLOCK_FORMATS, Z_LAB, with_output, write_head
from models import close, target

from treespec.draft.heads.loading import load_trained_head
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.registry import HEAD_KINDS, detect_kind


def own_output(head):
    """The head that `with_output` describes."""
    made = type(head)(head.config | {"own_output": True})
    tensors = with_output(head)
    made.fill({name: tensors[name] for name in tensors if name in made.state_dict()})
    return made


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_directory_drafts_as_the_head_that_it_was_built_from(name, tmp_path):
    config, tensors_of, make, changes = BLOCK_FORMATS[name]
    head = make(**changes)
    tensors = tensors_of(head)
    folder = write_head(tmp_path / "head", config, tensors)
    loaded = load_trained_head(str(folder), target("llama"))
    expected = own_output(head) if "lm_head.weight" in tensors and make is build_dflash else head
    close(draft_block(loaded), draft_block(expected), 1e-5, 1e-4)
    assert detect_kind(config, tensors) == loaded.kind
    assert HEAD_KINDS[loaded.kind].levels(config, tensors) == loaded.max_depth == len(draft_block(loaded))
    save_head(loaded, tmp_path / "again")
    close(draft_block(load_head(tmp_path / "again")), draft_block(expected), 1e-5, 1e-4)


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        ("z-lab", {"block_size": None}, "block_size"),
        ("z-lab", {"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "mask_token_id is None"),
        (
            "z-lab",
            {"dflash_config": Z_LAB["dflash_config"] | {"mask_token_id": 64}},
            "mask_token_id is 64, must be a token below 64",
        ),
        (
            "z-lab",
            {"dflash_config": {"projector_type": "jetspec"}},
            "'jetspec' is JetSpec of speculators, known, not read yet: it has rows",
        ),
        ("z-lab", {"attention_bias": True}, "attention_bias"),
        ("z-lab", {"dflash_config": [1]}, "head: "),
        ("P-EAGLE of SpecForge", {"speculators_config": [1]}, "head: "),
        ("z-lab", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ("P-EAGLE of speculators", {"mask_token_id": None}, "the one that the head was trained with"),
    ],
)
def test_a_config_that_does_not_tell_enough_is_refused_by_its_field(name, changes, complaint, tmp_path):
    config, tensors_of, make, built = BLOCK_FORMATS[name]
    with complains(complaint):
        load_head(write_head(tmp_path / "head", config | changes, tensors_of(make(**built))))


def test_a_head_with_a_smaller_output_vocabulary_is_saved_and_loaded(tmp_path):
    head = own_output(build_dflash())
    head.embed_tokens = None
    before = draft_block(head)
    head.restrict(torch.tensor([3, 8, 40]), target("llama"))
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert again.vocabulary.tolist() == [3, 8, 40]
    close(draft_block(again), before[:, [3, 8, 40]], 1e-5, 1e-4)
