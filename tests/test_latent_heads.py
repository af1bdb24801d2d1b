"""EAGLE-3 heads with latent attention: their attention is that of transformers' DeepSeek-V3, over inputs of 2 H."""

import pytest
import torch
from commands import complains
from drafters import DRAFT_PATHS, EIGHT_LAYERS, draft_paths, extrapolate
from head_files import EAGLE3_CONFIG, LAYER_IDS_KEY, rename_midlayer, write_head
from models import close, randn
from torch import nn
from training import change_json
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.host_step import find_head_step
from treespec.draft.heads.loading import build_new_head, roll_out_drafts
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.eagle3_fields import check_parts
from treespec.model.cpu.decoder_block import UnfusableError
from treespec.model.cpu.fused_layers import fuse_head
from treespec.model.cpu.packing import pack

SIZES = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7}
CONFIG = EAGLE3_CONFIG | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "first_k_dense_replace": 1,
    "eagle_config": {LAYER_IDS_KEY: [1, 3, 4], "use_aux_hidden_state": True},
    "draft_vocab_size": 64,
    "norm_output": True,
    **SIZES,
}
TEXT = torch.tensor([7, 3, 9, 12, 5, 40, 8, 21, 33])


def write_kimi(folder, **changes):
    """The directory of a head with random weights, norms too, by vLLM's names."""
    torch.manual_seed(3)
    rope = YARN | {"rope_type": "yarn", "rope_theta": 50000.0}
    parts = SIZES | {"norm_output": True, "rope_parameters": rope, "model_type": "kimi_k2"}
    head = build_new_head("eagle3", EIGHT_LAYERS, **parts).eval()
    for name, parameter in head.named_parameters():
        if name != "embed_tokens.weight":  # the target's
            parameter.data += 0.3 * torch.randn_like(parameter)
    return write_head(folder, CONFIG | changes, rename_midlayer(head.state_dict()))


def build_reference(head):
    """transformers' attention with the head's weights, and its rotary angles."""
    llama = head.llama
    config = DeepseekV3Config(
        hidden_size=llama.hidden_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_attention_heads,
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 50000.0},
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
        **SIZES,
    )
    attention = DeepseekV3Attention(config, 0).eval().float()
    width = 2 * llama.hidden_size
    outputs = {
        "q_a_proj": SIZES["q_lora_rank"],
        "kv_a_proj_with_mqa": SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"],
    }
    for name, size in outputs.items():
        setattr(attention, name, nn.Linear(width, size, bias=False, dtype=torch.float32))
    attention.load_state_dict(head.midlayer.self_attn.state_dict())
    return attention, DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
def test_the_attention_is_that_of_deepseek(tmp_path):
    """A causal text of nine positions, with yarn's factors: to 1e-5."""
    head = load_head(write_kimi(tmp_path / "head"))
    attention, rotary = build_reference(head)
    x = randn(2, 9, 2 * head.hidden_size)
    positions = torch.arange(9)
    ours = head.midlayer.self_attn(x, head.rotary(positions, x.dtype))
    mask = torch.full((9, 9), torch.finfo(torch.float32).min, dtype=torch.float32).triu(1)[None, None]
    wanted, _ = attention(x, rotary(x, positions[None]), mask)
    close(ours, wanted, 1e-5)
    assert head.aux_layers == (2, 4, 5)


@torch.no_grad()
def test_drafts_and_rollouts_are_the_head_run_over_each_path(tmp_path):
    head = load_head(write_kimi(tmp_path / "head"))
    features = EIGHT_LAYERS.compute_features(TEXT[None], head.aux_layers)[0]
    head.share_embedding(EIGHT_LAYERS.model.get_input_embeddings().weight)
    known = head.fuse(features[:-1])
    paths = torch.cat([extrapolate(head, TEXT[1:], known, list(path)) for path in DRAFT_PATHS])
    found = draft_paths(EagleProposer(head, EIGHT_LAYERS), EIGHT_LAYERS, TEXT[1:], features[:-1])
    close(found, head.compute_logits(paths), 1e-4)
    for step, rolled in enumerate(roll_out_drafts(head, EIGHT_LAYERS, TEXT, features, 3)):
        for row, logits in enumerate(rolled):
            path = TEXT[row + 2 : row + 2 + step].tolist()
            state = extrapolate(head, TEXT[1 : row + 2], head.fuse(features[: row + 1]), path)
            close(logits, head.compute_logits(state)[0], 1e-4)


def test_a_step_with_latent_attention_is_no_c_call(tmp_path):
    head = load_head(write_kimi(tmp_path / "head"), torch.bfloat16)
    pack(head)
    assert find_head_step(head, EIGHT_LAYERS) is None
    with pytest.raises(UnfusableError):
        fuse_head(head.midlayer)


REFUSED = {
    "attention_bias": (True, "attention_bias is true, and the file has no biases"),
    "model_type": ("kimi_k3", "model_type is 'kimi_k3': latent attention is read of deepseek_v2"),
    "v_head_dim": (13, "v_head_dim is 13, wider than keys of 12"),
    "qk_nope_head_dim": (None, "qk_nope_head_dim is None, must be a whole number"),
    "rope_interleave": (False, "rope_interleave is False: treespec reads True there"),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, "rope_type is 'linear': latent attention is read with"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_another_latent_attention_is_refused_by_name(field, tmp_path):
    value, complaint = REFUSED[field]
    folder = write_kimi(tmp_path / "head")
    change_json(folder, **{field: value})
    with complains(complaint):
        load_head(folder)


def test_no_export_writes_a_latent_attention(tmp_path):
    head = load_head(write_kimi(tmp_path / "head"))
    for to in ("vllm", "sglang", "speculators"):
        with pytest.raises(ValueError, match=r"its config\.json has kv_lora_rank, which no export writes"):
            check_parts(head, to)
