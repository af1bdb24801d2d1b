"""DFlash and P-EAGLE directories of other projects, built by hand: each drafts as the head that it was built from."""

import pytest
import torch
from equality import close
from models import follow, target
from refusals import complains
from test_block_heads import TEXT, dflash, p_eagle
from test_formats import LLAMA, write
from torch import nn

from treespec.draft.heads.loading import trained_head
from treespec.draft.heads.proposers import BlockProposer
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.registry import HEADS, kind_of

QWEN3 = LLAMA | {"head_dim": 8, "num_hidden_layers": 2, "model_type": "qwen3", "attention_bias": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
Z_LAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [-1, 0, 1]},
    "num_target_layers": 3,
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": QWEN3,
    "draft_vocab_size": 64,
    "block_size": 5,
    "aux_hidden_state_layer_ids": [0, 1, 2],
    "mask_token_id": 63,
}
GREEDY = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
PEAGLE = {
    "speculators_model_type": "peagle",
    "architectures": ["PEagleSpeculator"],
    "transformer_layer_config": LLAMA | {"model_type": "llama"},
    "draft_vocab_size": 64,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "norm_before_residual": False,
    "mask_token_id": 63,
    "speculators_config": GREEDY,
}


def verifiers_copies():
    """What speculators keeps of the target beside its own tensors."""
    return {"verifier_lm_head.weight": torch.ones(64, 32), "verifier_norm.weight": torch.ones(32)}


def with_output(head):
    """The tensors of a DFlash head of speculators: an output layer and embedding of its own, no mapping."""
    torch.manual_seed(5)
    own = {"lm_head.weight": torch.randn(64, 32), "embed_tokens.weight": torch.randn(64, 32)}
    all_tokens = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    return head.state_dict() | own | all_tokens | verifiers_copies()


def of_eagle3(head):
    return {name.replace("midlayer.", "layers.0."): value for name, value in head.state_dict().items()}


def own_output(head):
    """The head that `with_output` describes."""
    made = type(head)(head.config | {"own_output": True})
    tensors = with_output(head)
    made.fill({name: tensors[name] for name in tensors if name in made.state_dict()})
    return made


FORMATS = {  # config.json, tensors of a head, the head, what it is built from
    "z-lab": (Z_LAB, nn.Module.state_dict, dflash, {}),
    "z-lab, nested size": (
        {k: v for k, v in Z_LAB.items() if k != "block_size"}
        | {"dflash_config": Z_LAB["dflash_config"] | {"block_size": 5}},
        nn.Module.state_dict,
        dflash,
        {},
    ),
    "SpecForge with windows": (Z_LAB | MIXED, nn.Module.state_dict, dflash, MIXED),
    "z-lab, all windows": (
        Z_LAB | {"dflash_config": Z_LAB["dflash_config"] | {"use_swa": True, "swa_window_size": 4}},
        nn.Module.state_dict,
        dflash,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "causal": [False, False]},
    ),
    "speculators": (SPECULATORS, with_output, dflash, {}),
    "speculators from the anchor": (
        SPECULATORS | {"sample_from_anchor": True},
        with_output,
        dflash,
        {"sample_from_anchor": True},
    ),
    "speculators, windows without causality": (
        SPECULATORS | {"transformer_layer_config": QWEN3 | MIXED, "sliding_window_non_causal": True},
        with_output,
        dflash,
        MIXED | {"causal": [False, False]},
    ),
    "P-EAGLE of speculators": (PEAGLE, lambda head: of_eagle3(head) | verifiers_copies(), p_eagle, {}),
    "P-EAGLE of SpecForge": (
        LLAMA
        | {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 64}
        | {"mask_token_id": 63, "speculators_config": GREEDY},
        of_eagle3,
        p_eagle,
        {},
    ),
}


def levels(head):
    """[D, N] draft logits after a text."""
    model = target("llama")
    head.settle_aux_layers(model.layers)
    proposer = BlockProposer(head, model)
    follow(proposer, model.features(TEXT[None, :-1], head.aux_layers)[0], TEXT[1:])
    proposer.begin(TEXT[-1:])
    return proposer.levels(0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_directory_drafts_as_the_head_that_it_was_built_from(name, tmp_path):
    config, tensors_of, make, changes = FORMATS[name]
    head = make(**changes)
    tensors = tensors_of(head)
    folder = write(tmp_path / "head", config, tensors)
    loaded = trained_head(str(folder), target("llama"))
    expected = own_output(head) if "lm_head.weight" in tensors and make is dflash else head
    close(levels(loaded), levels(expected), 1e-5, 1e-4)
    assert kind_of(config, tensors) == loaded.kind
    assert HEADS[loaded.kind].levels(config, tensors) == loaded.max_depth == len(levels(loaded))
    save_head(loaded, tmp_path / "again")
    close(levels(load_head(tmp_path / "again")), levels(expected), 1e-5, 1e-4)


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
            {"dflash_config": {"projector_type": "dspark"}},
            "'dspark' is DSpark, known, not read yet: it has a Markov",
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
    config, tensors_of, make, built = FORMATS[name]
    with complains(complaint):
        load_head(write(tmp_path / "head", config | changes, tensors_of(make(**built))))


def test_a_head_with_fewer_tokens_of_its_own_output_is_saved_and_loaded_again(tmp_path):
    head = own_output(dflash())
    head.embed_tokens = None
    before = levels(head)
    head.restrict(torch.tensor([3, 8, 40]), target("llama"))
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert again.vocabulary.tolist() == [3, 8, 40]
    close(levels(again), before[:, [3, 8, 40]], 1e-5, 1e-4)
