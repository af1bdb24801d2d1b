"""Heads of features, MTP layers and PARD draft as a second reading of their authors' formulas: tests/reference_heads."""

from functools import cache, partial

import pytest
import torch
import transformers as hf
from drafters import BLOCK_TEXT, DRAFT_PATHS, draft_paths
from head_files import LAYER_IDS_KEY, write_head
from models import GROUPED, random_model
from reference_heads.eagle import choose_candidates, draft_by_steps, draft_eagle, draft_pard, step_mtp
from reference_heads.parts import Checkpoint, compare, fill, multiply

from treespec.draft.drafter import Frontier
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.loading import load_trained_head
from treespec.draft.heads.mtp import load_mtp
from treespec.draft.models.pard import PardProposer
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target

HIDDEN, VOCAB, HEADS, GROUPS, WIDTH, INNER, RANK = 32, 64, 4, 2, 8, 48, 6
AUX = [2, 4, 6]  # the aux layers, as vLLM counts them
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


def list_attention(width, norms=False, biases=False):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * WIDTH, width),
        "self_attn.k_proj.weight": (GROUPS * WIDTH, width),
        "self_attn.v_proj.weight": (GROUPS * WIDTH, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    }
    if norms:
        shapes |= {f"self_attn.{part}_norm.weight": (WIDTH,) for part in "qk"}
    if biases:
        shapes |= {"self_attn.q_proj.bias": (HEADS * WIDTH,)}
        shapes |= {f"self_attn.{part}_proj.bias": (GROUPS * WIDTH,) for part in "kv"}
    return shapes


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}


def list_latent_attention(query_rank):
    shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (8 + 4, 2 * HIDDEN),
        "self_attn.kv_a_layernorm.weight": (8,),
        "self_attn.kv_b_proj.weight": (HEADS * (8 + 10), 8),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 10),
    }
    if query_rank is None:
        return shapes | {"self_attn.q_proj.weight": (HEADS * 12, 2 * HIDDEN)}
    return shapes | {
        "self_attn.q_a_proj.weight": (query_rank, 2 * HIDDEN),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (HEADS * 12, query_rank),
    }


def list_layer(attention, norms):
    shapes = attention | {f"{name}.weight": (HIDDEN,) for name in norms}
    for part in ("gate", "up"):
        shapes[f"mlp.{part}_proj.weight"] = (INNER, HIDDEN)
    return shapes | {"mlp.down_proj.weight": (HIDDEN, INNER)}


def list_eagle(attention, fc_norm=False):
    layer = list_layer(attention, ["hidden_norm", "input_layernorm", "post_attention_layernorm"])
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    if fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}
    return shapes | {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "embed_tokens.weight": (VOCAB, HIDDEN),
    }


LLAMA = {
    "attention_bias": False,
    "head_dim": WIDTH,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
# As the config.json of published EAGLE-3 heads for Kimi K2.5, at tiny size.
KIMI = LLAMA | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "draft_vocab_size": VOCAB,
    "dtype": "float64",
    "eagle_config": {LAYER_IDS_KEY: [number - 1 for number in AUX], "use_aux_hidden_state": True},
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "model_type": "kimi_k2",
    "moe_layer_freq": 1,
    "num_key_value_heads": HEADS,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    **LATENT,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "type": "yarn",
}
# As NeMo AutoModel's pages list what its export writes.
EAGLE4 = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle4"],
    LAYER_IDS_KEY: AUX,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": False,
    "sliding_window": 4,
    "candidate_head": {"rank": RANK, "num_candidates": 7},
}
LOW_RANK = {"efficient_lm_head.weight": (VOCAB, RANK), "efficient_lm_head_down_proj.weight": (RANK, HIDDEN)}
EAGLES = {  # name: (config.json, shapes)
    "latent": (KIMI, list_eagle(list_latent_attention(16))),
    "latent-yarn": (KIMI | {"rope_scaling": YARN}, list_eagle(list_latent_attention(16))),
    "latent-yarn-scaled": (
        KIMI | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
        list_eagle(list_latent_attention(16)),
    ),
    "latent-direct-queries": (KIMI | {"q_lora_rank": None}, list_eagle(list_latent_attention(None))),
    "latent-normed-residual": (KIMI | {"norm_before_residual": True}, list_eagle(list_latent_attention(16))),
    "eagle4": (EAGLE4, list_eagle(list_attention(2 * HIDDEN), fc_norm=True) | LOW_RANK),
    "eagle4-normed-residual": (
        EAGLE4 | {"norm_before_residual": True},
        list_eagle(list_attention(2 * HIDDEN), fc_norm=True) | LOW_RANK,
    ),
    "eagle4-plain-states": (
        EAGLE4 | {"norm_output": False, "fc_norm": False},
        list_eagle(list_attention(2 * HIDDEN)) | LOW_RANK,
    ),
}


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


def list_mtp(norms, biases):
    names = ["input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"]
    return list_layer(list_attention(HIDDEN, norms, biases), names) | {"input_proj.weight": (HIDDEN, 2 * HIDDEN)}


SPECULATORS_MTP = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]},
    },
    "num_nextn_predict_layers": 1,
    "transformers_version": "5.2.0",
    "dtype": "float64",
}
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
    checkpoint = Checkpoint(LLAMA | {"rms_norm_eps": model.config.rms_norm_eps, "rope_theta": 10000.0}, tensors)
    step = partial(step_mtp, checkpoint, hidden_first=hidden_first)
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
