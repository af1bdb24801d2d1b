"""Heads as other projects write them: what is redundant is derived, and the logits are those of the file's tensors.

The references read the tensors by their published names and share no code with the heads.
"""

import pytest
import torch
from drafters import BLOCK_TEXT, DRAFT_VOCAB, EIGHT_LAYERS, build_dflash, draft_block, draft_dflash_plainly
from head_files import (
    CORE_TENSORS,
    EAGLE3_CONFIG,
    EAGLE3_TENSORS,
    EAGLE_TENSORS,
    HASS_CONFIG,
    LAYER_IDS_KEY,
    LLAMA_CONFIG,
    MODELOPT_CONFIG,
    TENSORS_WITHOUT_BIAS,
    Z_LAB,
    as_speculators,
    drop_tensors,
    in_model,
    nest_config,
    rename_midlayer,
    write_head,
)
from models import close, randn, same_weights, target
from torch.nn.functional import pad, rms_norm, silu, softmax

from treespec.draft.heads.loading import attach_to_target
from treespec.draft.vocabulary import expand_logits
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.formats.export import compute_outputs
from treespec.model.output import captured

IDS_OF_TEXT = torch.tensor([3, 9, 12, 5, 40, 8])
FULL = {name: value for name, value in EAGLE3_CONFIG.items() if name != "draft_vocab_size"}


def layer_output(w, x, residual, eps=1e-6, heads=4, groups=2, theta=1e4):
    """[T, H] one Llama layer behind its norms of inputs. x: [T, in]. w: its tensors by their names below the layer."""

    def split(name, count):
        return (x @ w[f"self_attn.{name}.weight"].T).view(len(x), count, -1).transpose(0, 1)

    def turned(part):
        half = part.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * theta ** -(torch.arange(half, dtype=torch.float32) / half)
        z = torch.complex(part[..., :half], part[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], dim=-1)

    q = turned(split("q_proj", heads))
    k = turned(split("k_proj", groups)).repeat_interleave(heads // groups, 0)
    v = split("v_proj", groups).repeat_interleave(heads // groups, 0)
    scores = q @ k.transpose(1, 2) / k.shape[-1] ** 0.5
    scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    out = residual + (softmax(scores, -1) @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    inner = rms_norm(out, out.shape[-1:], w["post_attention_layernorm.weight"], eps)
    inner = silu(inner @ w["mlp.gate_proj.weight"].T) * (inner @ w["mlp.up_proj.weight"].T)
    return out + inner @ w["mlp.down_proj.weight"].T


def below(w, name):
    return {key.removeprefix(name): value for key, value in w.items() if key.startswith(name)}


def eagle3_states(w, embedding, aux):
    """[T, H] what EAGLE-3's output layer takes after a text. w: tensors by SafeAILab's names. aux: [T, 3 H]."""
    layer = below(w, "midlayer.")
    fused = aux @ w["fc.weight"].T
    embedded = rms_norm(embedding[IDS_OF_TEXT], (32,), layer["input_layernorm.weight"], 1e-6)
    both = torch.cat([embedded, rms_norm(fused, (32,), layer["hidden_norm.weight"], 1e-6)], dim=-1)
    return rms_norm(layer_output(layer, both, fused), (32,), w["norm.weight"], 1e-6)


def eagle_states(w, embedding, features):
    """[T, H] the features that EAGLE-1 extrapolates. w: tensors by SafeAILab's names."""
    x = torch.cat([embedding[IDS_OF_TEXT], features], dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    return layer_output(below(w, "layers.0."), x, x)


def spread(logits, tokens, size=64):
    """[T, V] logits over the target's tokens."""
    return torch.full((len(logits), size), -torch.inf, dtype=torch.float32).index_copy(1, tokens, logits)


@torch.no_grad()
def drafted(folder, features, model=EIGHT_LAYERS):
    """[T, V] the first drafts after each token, by a head that is read and fitted to its target."""
    head = load_head(folder)
    attach_to_target(head, model, "head")
    hidden = head.forward_step(IDS_OF_TEXT[None], head.fuse(features[None]), torch.arange(len(features)))
    return expand_logits(head.compute_logits(hidden[0], model), head, model)


AUX = randn(len(IDS_OF_TEXT), 96, generator=torch.Generator().manual_seed(1))
OUTPUT = EIGHT_LAYERS.model.get_output_embeddings().weight.detach()
EMBEDDING = EIGHT_LAYERS.model.get_input_embeddings().weight.detach()
OWN = randn(64, 32, generator=torch.Generator().manual_seed(2))


def prefixed(tensors, *names):
    return {names[i % len(names)] + name: value for i, (name, value) in enumerate(tensors.items())}


ROWS = EAGLE3_TENSORS["lm_head.weight"]
ALL = {"lm_head.weight": OWN}
SHUFFLED = torch.randperm(32, generator=torch.Generator().manual_seed(3))
# name: (config.json, tensors, the output layer and embedding that they stand for, tokens of the output layer)
EAGLE3_FILES = {
    "no lm_head, all tokens": (FULL, CORE_TENSORS, OUTPUT, EMBEDDING, None),
    "no lm_head, all tokens declared": (FULL | {"draft_vocab_size": 64}, CORE_TENSORS, OUTPUT, EMBEDDING, None),
    "tied embeddings": (
        FULL | {"tie_word_embeddings": True},
        CORE_TENSORS | {"embed_tokens.weight": OWN},
        OWN,
        OWN,
        None,
    ),
    "d2t without t2d": (EAGLE3_CONFIG, drop_tensors("t2d"), ROWS, EMBEDDING, DRAFT_VOCAB),
    "d2t of int32, t2d of uint8": (
        EAGLE3_CONFIG,
        EAGLE3_TENSORS | {"d2t": EAGLE3_TENSORS["d2t"].int(), "t2d": EAGLE3_TENSORS["t2d"].to(torch.uint8)},
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "d2t in another order": (
        EAGLE3_CONFIG,
        EAGLE3_TENSORS | {"d2t": DRAFT_VOCAB[SHUFFLED] - torch.arange(32), "lm_head.weight": ROWS[SHUFFLED]},
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "ModelOpt": (
        EAGLE3_CONFIG | MODELOPT_CONFIG,
        rename_midlayer(drop_tensors("t2d", "embed_tokens.weight")),
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "ModelOpt, all tokens": (
        FULL | MODELOPT_CONFIG | {"draft_vocab_size": 64},
        rename_midlayer(CORE_TENSORS | ALL | {"d2t": torch.zeros(64, dtype=torch.int64)}),
        OWN,
        EMBEDDING,
        None,
    ),
    "no draft_vocab_size": (FULL, EAGLE3_TENSORS, ROWS, EMBEDDING, DRAFT_VOCAB),
    "names behind model.": (EAGLE3_CONFIG, prefixed(EAGLE3_TENSORS, "model."), ROWS, EMBEDDING, DRAFT_VOCAB),
    "names behind model. and without": (
        EAGLE3_CONFIG,
        prefixed(EAGLE3_TENSORS, "model.", ""),
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "names of compiled modules": (
        EAGLE3_CONFIG,
        {
            name.replace("midlayer.", "midlayer._orig_mod."): v
            for name, v in prefixed(EAGLE3_TENSORS, "_orig_mod.").items()
        },
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "NeMo AutoModel": (
        EAGLE3_CONFIG | {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3},
        {(n if n[:2] in ("lm", "d2", "t2") else f"model.{n}"): v for n, v in rename_midlayer(EAGLE3_TENSORS).items()},
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "a plain Llama config": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"]},
        CORE_TENSORS | ALL,
        OWN,
        EMBEDDING,
        None,
    ),
    "40 layers by the config": (
        EAGLE3_CONFIG | {"num_hidden_layers": 40},
        EAGLE3_TENSORS,
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "widths that the config has otherwise": (
        EAGLE3_CONFIG | {"intermediate_size": 11008, "num_key_value_heads": 4},
        EAGLE3_TENSORS,
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "a padded output layer": (
        EAGLE3_CONFIG,
        EAGLE3_TENSORS | {"lm_head.weight": pad(ROWS, (0, 0, 0, 6))},
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "more tokens than the config says": (
        FULL | {"vocab_size": 60},
        CORE_TENSORS | ALL | {"embed_tokens.weight": EMBEDDING},
        OWN,
        EMBEDDING,
        None,
    ),
    "more tokens than the target": (
        FULL | {"vocab_size": 66},
        CORE_TENSORS | {"lm_head.weight": pad(OWN, (0, 0, 0, 2)), "embed_tokens.weight": pad(OWN, (0, 0, 0, 2))},
        OWN,
        OWN,
        None,
    ),
    "fewer tokens than the target": (
        FULL | {"vocab_size": 62},
        CORE_TENSORS | {"lm_head.weight": OWN[:62]},
        OWN[:62],
        EMBEDDING,
        torch.arange(62),
    ),
    "d2t for more tokens than the target": (
        EAGLE3_CONFIG | {"vocab_size": 66},
        drop_tensors("t2d", "embed_tokens.weight"),
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "mrope": (
        EAGLE3_CONFIG | {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        EAGLE3_TENSORS,
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
    "mrope beside a type": (
        EAGLE3_CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        EAGLE3_TENSORS,
        ROWS,
        EMBEDDING,
        DRAFT_VOCAB,
    ),
}


@pytest.mark.parametrize("name", EAGLE3_FILES)
def test_an_eagle3_file_drafts_what_its_tensors_say(name, tmp_path):
    config, tensors, output, embedding, tokens = EAGLE3_FILES[name]
    found = drafted(write_head(tmp_path, {LAYER_IDS_KEY: [2, 4, 5]} | config, tensors), AUX)
    logits = eagle3_states(EAGLE3_TENSORS, embedding, AUX) @ output.T
    close(found, logits if tokens is None else spread(logits, tokens), 1e-5, 1e-4)


FEATURES = randn(len(IDS_OF_TEXT), 32, generator=torch.Generator().manual_seed(4))


TOKEN_MAP = DRAFT_VOCAB[SHUFFLED]
EAGLE_FILES = {  # config.json, tensors by its project's names, by SafeAILab's, output layer, tokens
    **{
        f"no bias, {name}": (
            LLAMA_CONFIG | {"architectures": [name]},
            TENSORS_WITHOUT_BIAS,
            TENSORS_WITHOUT_BIAS,
            OUTPUT,
            None,
        )
        for name in ("EagleLlamaForCausalLM", "EagleQwen2ForCausalLM", "EagleMistralForCausalLM", "LlamaForCausalLM")
    },
    "HASS of speculators": (HASS_CONFIG, as_speculators(EAGLE_TENSORS), EAGLE_TENSORS, OUTPUT, None),
    "EAGLE-1 of speculators": (
        HASS_CONFIG | {"fusion_bias": False},
        as_speculators(TENSORS_WITHOUT_BIAS),
        TENSORS_WITHOUT_BIAS,
        OUTPUT,
        None,
    ),
    "vLLM's nested config": (nest_config(), in_model(EAGLE_TENSORS, lm_head__weight=OWN), EAGLE_TENSORS, OWN, None),
    "vLLM's token_map": (
        nest_config(truncated_vocab_size=32),
        in_model(EAGLE_TENSORS, lm_head__weight=OWN, token_map=TOKEN_MAP),
        EAGLE_TENSORS,
        OWN[DRAFT_VOCAB],
        DRAFT_VOCAB,
    ),
    "vLLM's token_map over its rows": (
        nest_config(truncated_vocab_size=32),
        in_model(EAGLE_TENSORS, lm_head__weight=OWN[TOKEN_MAP], token_map=TOKEN_MAP),
        EAGLE_TENSORS,
        OWN[DRAFT_VOCAB],
        DRAFT_VOCAB,
    ),
}


@pytest.mark.parametrize("name", EAGLE_FILES)
def test_an_eagle_file_drafts_what_its_tensors_say(name, tmp_path):
    config, tensors, plain, output, tokens = EAGLE_FILES[name]
    found = drafted(write_head(tmp_path, config, tensors), FEATURES)
    embedding = EMBEDDING if config.get("fusion_bias") is not None else plain["embed_tokens.weight"]
    logits = eagle_states(plain, embedding, FEATURES) @ output.T
    close(found, logits if tokens is None else spread(logits, tokens), 1e-5, 1e-4)


@pytest.mark.parametrize("name", [*EAGLE3_FILES, *EAGLE_FILES])
def test_a_file_that_was_read_and_saved_gives_the_same_head(name, tmp_path):
    config, tensors = (EAGLE3_FILES | EAGLE_FILES)[name][:2]
    head = load_head(write_head(tmp_path / "head", config, tensors))
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.kind == head.kind
    assert same_weights(again.state_dict(), head.state_dict())
    assert torch.equal(compute_outputs(head), compute_outputs(again))


def test_jetspecs_causal_head_drafts_causally_in_all_layers(tmp_path):
    head = build_dflash(causal=[True, True])
    model = target("llama")
    config = Z_LAB | {"dflash_config": Z_LAB["dflash_config"] | {"causal_head": True}}
    loaded = load_head(write_head(tmp_path, config, head.state_dict()))
    close(draft_block(loaded), draft_dflash_plainly(head, model, BLOCK_TEXT), 2e-4, 1e-4)
    assert (draft_block(loaded) - draft_dflash_plainly(build_dflash(), model, BLOCK_TEXT)).abs().max() > 0.1


def test_aux_layer_l_is_what_the_last_layer_gives_before_the_norm():
    tokens = torch.arange(3, 9)[None]
    layers = EIGHT_LAYERS.layers
    features = EIGHT_LAYERS.compute_features(tokens, (2, 4, layers))
    last = EIGHT_LAYERS.compute_features(tokens)
    norm = EIGHT_LAYERS.tree_decoder.decoder.norm
    close(rms_norm(features[..., 64:], (32,), norm.weight, norm.variance_epsilon), last, 1e-5, 1e-4)
    assert torch.equal(features[..., :64], EIGHT_LAYERS.compute_features(tokens, (2, 4)))
    with captured(EIGHT_LAYERS.tree_decoder.stack, (layers,)) as inputs:
        EIGHT_LAYERS.tree_decoder.decoder(tokens)
    close(inputs[layers], features[..., 64:], 1e-5, 1e-4)


@pytest.mark.parametrize("ids", [[2, 4, 8], None])
def test_a_head_that_reads_the_last_layers_output_fits_its_target(ids, tmp_path):
    nested = {} if ids else {"eagle_config": {LAYER_IDS_KEY: [1, 3, 7]}}
    head = load_head(write_head(tmp_path, EAGLE3_CONFIG | nested | {LAYER_IDS_KEY: ids}, EAGLE3_TENSORS))
    attach_to_target(head, EIGHT_LAYERS, "head")
    assert head.aux_layers == (2, 4, 8)
    assert compute_outputs(head).isfinite().all()
