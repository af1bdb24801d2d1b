"""Heads of features, MTP layers and PARD draft as a second reading says: tests/reference_heads."""

from functools import cache, partial

import pytest
import torch
import transformers as hf
from drafters import BLOCK_TEXT, DRAFT_PATHS, draft_paths
from head_files import write_head
from models import GROUPED, random_model
from reference_heads.eagle import (
    choose_candidates,
    draft_by_steps,
    draft_eagle,
    draft_pard,
    step_first_eagle,
    step_mtp,
)
from reference_heads.eagle_files import AUX, EAGLES, KIMI, LLAMA, MTP_LAYER, SPECULATORS_MTP, WIDTH, list_mtp
from reference_heads.parts import Checkpoint, compare, fill, multiply

from treespec.draft.drafter import Frontier
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.loading import build_new_head, load_trained_head
from treespec.draft.heads.mtp import load_mtp
from treespec.draft.models.pard import PardProposer
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target

TOLERANCE = 1e-5
FOLLOWING = BLOCK_TEXT[1:].tolist()


@cache
def build_target(kind="llama"):
    sizes = GROUPED | {"num_hidden_layers": 8, "head_dim": WIDTH}
    config = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config, "qwen2": hf.Qwen2Config}[kind](**sizes)
    return Target(random_model(config).double())


@cache
def read_states(kind="llama"):
    """The outputs of transformers' model over all tokens but the last."""
    with torch.no_grad():
        return build_target(kind).model.model(BLOCK_TEXT[None, :-1], output_hidden_states=True)


@torch.no_grad()
def draft_by_head(folder):
    """[8, V] logits of treespec after each of `DRAFT_PATHS`."""
    target = build_target()
    head = load_trained_head(str(folder), target)
    features = target.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]
    return draft_paths(EagleProposer(head, target), target, BLOCK_TEXT[1:], features)


def draft_by_reference(checkpoint):
    aux = torch.cat([read_states().hidden_states[number][0] for number in AUX], dim=-1)
    embedding = checkpoint.tensors["embed_tokens.weight"]
    for path in DRAFT_PATHS:
        state = draft_eagle(checkpoint, aux, embedding, FOLLOWING, path)
        if "candidate_head" in checkpoint.config:
            yield choose_candidates(checkpoint, state, checkpoint.config["candidate_head"]["num_candidates"])
        else:
            yield multiply(checkpoint.tensors, "lm_head", state)


@torch.no_grad()
@pytest.mark.parametrize("name", EAGLES)
def test_a_head_of_features_drafts_as_a_second_reading_says(name, tmp_path):
    config, shapes = EAGLES[name]
    tensors = fill(shapes)
    found = draft_by_head(write_head(tmp_path / "head", config, tensors))
    for row, wanted in zip(found, draft_by_reference(Checkpoint(config, tensors)), strict=True):
        assert compare(row, wanted) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 10])
def test_a_window_of_eagle_1_is_the_last_positions_of_a_path(window):
    """The deepest paths of `DRAFT_PATHS` have ten positions, the text eight."""
    target = build_target()
    head = build_new_head("eagle", target, **set_window(window)).double()
    head.embed_tokens = None  # the target's own, not a copy
    tensors = fill({name: tuple(value.shape) for name, value in head.state_dict().items()})
    head.load_state_dict(tensors)
    head.share_embedding(target.model.get_input_embeddings().weight)
    states = read_states().last_hidden_state[0]
    found = draft_paths(EagleProposer(head, target), target, BLOCK_TEXT[1:], states)
    config = head.llama.to_dict() | {"rope_theta": 1e4, "sliding_window": window}
    step = partial(step_first_eagle, Checkpoint(config, tensors))
    for row, path in zip(found, DRAFT_PATHS, strict=True):
        state = draft_by_steps(step, states, target.model.get_input_embeddings().weight, FOLLOWING, path)
        assert compare(row, state @ target.model.get_output_embeddings().weight.T) < TOLERANCE


def set_window(window):
    if window is None:
        return {}
    return {"layer_types": ["sliding_attention"], "sliding_window": window}


def quantise(tensors, block):
    """Matrices in fp8 with a factor a block, as DeepSeek stores them, and what they stand for."""
    stored = dict(tensors)
    meant = dict(tensors)
    for name, value in tensors.items():
        if "_proj" in name:
            rows, columns = (-(-size // block) for size in value.shape)
            factors = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)).float() + 0.5
            stored[name] = value.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = factors
            spread = factors.double().repeat_interleave(block, 0).repeat_interleave(block, 1)
            meant[name] = stored[name].double() * spread[: value.shape[0], : value.shape[1]]
    return stored, meant


@torch.no_grad()
def test_a_latent_head_in_fp8_drafts_as_a_second_reading_says(tmp_path):
    stored, meant = quantise(fill(EAGLES["latent"][1]), 12)
    quantised = {"quant_method": "fp8", "weight_block_size": [12, 12], "activation_scheme": "dynamic", "fmt": "e4m3"}
    found = draft_by_head(write_head(tmp_path / "head", KIMI | {"quantization_config": quantised}, stored))
    for row, wanted in zip(found, draft_by_reference(Checkpoint(KIMI, meant)), strict=True):
        assert compare(row, wanted) < TOLERANCE


MTP_LAYERS = {  # name: (the target, the layer's prefix, whether the state comes first)
    "speculators": ("qwen3", "mtp_layers.0.", False),
    "fastmtp": ("qwen2", "model.mtp_layers.0.", True),
}


def write_mtp(folder, name):
    kind, prefix, _ = MTP_LAYERS[name]
    tensors = fill(list_mtp(kind == "qwen3", kind == "qwen2"))
    config = build_target(kind).model.config.to_diff_dict()
    if name == "speculators":
        config = SPECULATORS_MTP | {"transformer_layer_config": config}
    write_head(folder, config, {prefix + part: value for part, value in tensors.items()})
    return tensors


@torch.no_grad()
@pytest.mark.parametrize("name", MTP_LAYERS)
def test_a_finetuned_mtp_layer_drafts_as_a_second_reading_says(name, tmp_path):
    kind, _, hidden_first = MTP_LAYERS[name]
    target = build_target(kind)
    tensors = write_mtp(tmp_path / "layer", name)
    proposer = load_mtp(DrafterSpec.parse(f"mtp:{tmp_path / 'layer'}"), target)
    found = draft_paths(proposer, target, BLOCK_TEXT[1:], target.compute_features(BLOCK_TEXT[None, :-1])[0])
    model = target.model
    step = partial(step_mtp, Checkpoint(MTP_LAYER, tensors), hidden_first=hidden_first)
    for row, path in zip(found, DRAFT_PATHS, strict=True):
        states = read_states(kind).last_hidden_state[0]
        state = draft_by_steps(step, states, model.get_input_embeddings().weight, FOLLOWING, path)
        assert compare(row, state @ model.get_output_embeddings().weight.T) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_pard_drafts_as_a_second_reading_says(kind):
    target = build_target(kind)
    proposer = PardProposer(target, build_target(), 61, 4)
    proposer.observe([torch.empty(len(BLOCK_TEXT) - 1, 0)], [BLOCK_TEXT])
    first = proposer.begin(BLOCK_TEXT[-1:])[0]
    nodes = Frontier(torch.tensor([5]), torch.tensor([0]))
    found = torch.cat([first, *(proposer.extend([nodes])[0] for _ in range(3))])
    config = LLAMA | {"num_hidden_layers": 8, "rms_norm_eps": target.config.rms_norm_eps, "rope_theta": 10000.0}
    tensors = dict(target.model.state_dict())
    wanted = draft_pard(Checkpoint(config, tensors), BLOCK_TEXT.tolist(), 61, 4)
    assert compare(found, wanted) < TOLERANCE
