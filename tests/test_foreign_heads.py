"""Heads as other projects write them: what is redundant is derived, and the logits are those of the file's tensors.

The references read the tensors by their published names and share no code with the heads.
"""

import pytest
import torch
from equality import close, same_weights
from models import target
from test_block_formats import Z_LAB, levels
from test_block_heads import TEXT, dflash, plain_dflash
from test_formats import DRAFTED, EIGHT, IDS, LLAMA, THREE, one, three, write
from torch.nn.functional import pad, rms_norm, silu, softmax

from treespec.draft.heads.loading import fit
from treespec.draft.vocabulary import whole
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.formats.export import outputs
from treespec.model.output import captured

IDS_OF_TEXT = torch.tensor([3, 9, 12, 5, 40, 8])
FULL = {name: value for name, value in THREE.items() if name != "draft_vocab_size"}
MODELOPT = {  # the fields of NVIDIA ModelOpt's template
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "initializer_range": 0.02,
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "transformers_version": "5.3.0",
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "pretraining_tp": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "mlp_bias": False,
    "hidden_act": "silu",
    "eagle_config": {
        IDS: [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}


def layer_output(w, x, residual, eps=1e-6, heads=4, groups=2, theta=1e4):
    """[T, H] one Llama layer behind its norms of inputs. x: [T, in]. w: its tensors by their names below the layer."""

    def split(name, count):
        return (x @ w[f"self_attn.{name}.weight"].T).view(len(x), count, -1).transpose(0, 1)

    def turned(part):
        half = part.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * theta ** -(torch.arange(half) / half)
        z = torch.complex(part[..., :half], part[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], dim=-1)

    q = turned(split("q_proj", heads))
    k = turned(split("k_proj", groups)).repeat_interleave(heads // groups, 0)
    v = split("v_proj", groups).repeat_interleave(heads // groups, 0)
    scores = q @ k.transpose(1, 2) / k.shape[-1] ** 0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
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
    return torch.full((len(logits), size), -torch.inf).index_copy(1, tokens, logits)


@torch.no_grad()
def drafted(folder, features, model=EIGHT):
    """[T, V] the first drafts after each token, by a head that is read and fitted to its target."""
    head = load_head(folder)
    fit(head, model, "head")
    hidden = head.step(IDS_OF_TEXT[None], head.fuse(features[None]), torch.arange(len(features)))
    return whole(head.logits(hidden[0], model), head, model)


def tensors_of(make):
    """The tensors of a head, with random norms, by the names of SafeAILab/EAGLE."""
    torch.manual_seed(7)
    tensors = {name: value.detach().clone() for name, value in make().state_dict().items()}
    for name, value in tensors.items():
        if "norm" in name:
            value += 0.3 * torch.randn_like(value)
    return tensors


EAGLE3 = tensors_of(three)
AUX = torch.randn(len(IDS_OF_TEXT), 96, generator=torch.Generator().manual_seed(1))
OUTPUT = EIGHT.model.get_output_embeddings().weight.detach()
EMBEDDING = EIGHT.model.get_input_embeddings().weight.detach()
OWN = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))


def without(*names, **changes):
    return {name: value for name, value in EAGLE3.items() if name not in names} | changes


def prefixed(tensors, *names):
    return {names[i % len(names)] + name: value for i, (name, value) in enumerate(tensors.items())}


def at_layer_0(tensors):
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


CORE = without("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")
ROWS = EAGLE3["lm_head.weight"]
ALL = {"lm_head.weight": OWN}
SHUFFLED = torch.randperm(32, generator=torch.Generator().manual_seed(3))
# name: (config.json, tensors, the output layer and embedding that they stand for, tokens of the output layer)
EAGLE3_FILES = {
    "no lm_head, all tokens": (FULL, CORE, OUTPUT, EMBEDDING, None),
    "no lm_head, all tokens declared": (FULL | {"draft_vocab_size": 64}, CORE, OUTPUT, EMBEDDING, None),
    "tied embeddings": (
        FULL | {"tie_word_embeddings": True},
        CORE | {"embed_tokens.weight": OWN},
        OWN,
        OWN,
        None,
    ),
    "d2t without t2d": (THREE, without("t2d"), ROWS, EMBEDDING, DRAFTED),
    "d2t of int32, t2d of uint8": (
        THREE,
        EAGLE3 | {"d2t": EAGLE3["d2t"].int(), "t2d": EAGLE3["t2d"].to(torch.uint8)},
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "d2t in another order": (
        THREE,
        EAGLE3 | {"d2t": DRAFTED[SHUFFLED] - torch.arange(32), "lm_head.weight": ROWS[SHUFFLED]},
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "ModelOpt": (THREE | MODELOPT, at_layer_0(without("t2d", "embed_tokens.weight")), ROWS, EMBEDDING, DRAFTED),
    "ModelOpt, all tokens": (
        FULL | MODELOPT | {"draft_vocab_size": 64},
        at_layer_0(CORE | ALL | {"d2t": torch.zeros(64, dtype=torch.int64)}),
        OWN,
        EMBEDDING,
        None,
    ),
    "no draft_vocab_size": (FULL, EAGLE3, ROWS, EMBEDDING, DRAFTED),
    "names behind model.": (THREE, prefixed(EAGLE3, "model."), ROWS, EMBEDDING, DRAFTED),
    "names behind model. and without": (THREE, prefixed(EAGLE3, "model.", ""), ROWS, EMBEDDING, DRAFTED),
    "names of compiled modules": (
        THREE,
        {name.replace("midlayer.", "midlayer._orig_mod."): v for name, v in prefixed(EAGLE3, "_orig_mod.").items()},
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "NeMo AutoModel": (
        THREE | {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3},
        {(n if n[:2] in ("lm", "d2", "t2") else f"model.{n}"): v for n, v in at_layer_0(EAGLE3).items()},
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "a plain Llama config": (LLAMA | {"architectures": ["LlamaForCausalLM"]}, CORE | ALL, OWN, EMBEDDING, None),
    "40 layers by the config": (THREE | {"num_hidden_layers": 40}, EAGLE3, ROWS, EMBEDDING, DRAFTED),
    "widths that the config has otherwise": (
        THREE | {"intermediate_size": 11008, "num_key_value_heads": 4},
        EAGLE3,
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "a padded output layer": (
        THREE,
        EAGLE3 | {"lm_head.weight": pad(ROWS, (0, 0, 0, 6))},
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "more tokens than the config says": (
        FULL | {"vocab_size": 60},
        CORE | ALL | {"embed_tokens.weight": EMBEDDING},
        OWN,
        EMBEDDING,
        None,
    ),
    "more tokens than the target": (
        FULL | {"vocab_size": 66},
        CORE | {"lm_head.weight": pad(OWN, (0, 0, 0, 2)), "embed_tokens.weight": pad(OWN, (0, 0, 0, 2))},
        OWN,
        OWN,
        None,
    ),
    "fewer tokens than the target": (
        FULL | {"vocab_size": 62},
        CORE | {"lm_head.weight": OWN[:62]},
        OWN[:62],
        EMBEDDING,
        torch.arange(62),
    ),
    "d2t for more tokens than the target": (
        THREE | {"vocab_size": 66},
        without("t2d", "embed_tokens.weight"),
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "mrope": (
        THREE | {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        EAGLE3,
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
    "mrope beside a type": (
        THREE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        EAGLE3,
        ROWS,
        EMBEDDING,
        DRAFTED,
    ),
}


@pytest.mark.parametrize("name", EAGLE3_FILES)
def test_an_eagle3_file_drafts_what_its_tensors_say(name, tmp_path):
    config, tensors, output, embedding, tokens = EAGLE3_FILES[name]
    found = drafted(write(tmp_path, {IDS: [2, 4, 5]} | config, tensors), AUX)
    logits = eagle3_states(EAGLE3, embedding, AUX) @ output.T
    close(found, logits if tokens is None else spread(logits, tokens), 1e-5, 1e-4)


EAGLE = tensors_of(one)
PLAIN = {name: value for name, value in EAGLE.items() if name != "fc.bias"}
FEATURES = torch.randn(len(IDS_OF_TEXT), 32, generator=torch.Generator().manual_seed(4))
HASS = {
    "speculators_model_type": "eagle",
    "speculators_version": "0.1.0",
    "fusion_bias": True,
    "layernorms": False,
    "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
    "transformer_layer_architecture": "LlamaDecoderLayer",
    "transformer_layer_config": LLAMA | {"model_type": "llama"},
    "speculators_config": {
        "algorithm": "eagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
    },
}


def as_speculators(tensors):
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    return {name: value for name, value in tensors.items() if name != "embed_tokens.weight"}


def nested(**fields):
    """vLLM's config of EAGLE-1: the layer in `model`."""
    layer = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eagle_fc_bias": True}
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": layer} | fields


def in_model(tensors, **own):
    inner = {f"model.{name}" if not name.startswith("fc") else name: value for name, value in tensors.items()}
    return inner | {name.replace("__", "."): value for name, value in own.items()}


TOKEN_MAP = DRAFTED[SHUFFLED]
EAGLE_FILES = {  # config.json, tensors by its project's names, by SafeAILab's, output layer, tokens
    **{
        f"no bias, {name}": (LLAMA | {"architectures": [name]}, PLAIN, PLAIN, OUTPUT, None)
        for name in ("EagleLlamaForCausalLM", "EagleQwen2ForCausalLM", "EagleMistralForCausalLM", "LlamaForCausalLM")
    },
    "HASS of speculators": (HASS, as_speculators(EAGLE), EAGLE, OUTPUT, None),
    "EAGLE-1 of speculators": (HASS | {"fusion_bias": False}, as_speculators(PLAIN), PLAIN, OUTPUT, None),
    "vLLM's nested config": (nested(), in_model(EAGLE, lm_head__weight=OWN), EAGLE, OWN, None),
    "vLLM's token_map": (
        nested(truncated_vocab_size=32),
        in_model(EAGLE, lm_head__weight=OWN, token_map=TOKEN_MAP),
        EAGLE,
        OWN[DRAFTED],
        DRAFTED,
    ),
    "vLLM's token_map over its rows": (
        nested(truncated_vocab_size=32),
        in_model(EAGLE, lm_head__weight=OWN[TOKEN_MAP], token_map=TOKEN_MAP),
        EAGLE,
        OWN[DRAFTED],
        DRAFTED,
    ),
}


@pytest.mark.parametrize("name", EAGLE_FILES)
def test_an_eagle_file_drafts_what_its_tensors_say(name, tmp_path):
    config, tensors, plain, output, tokens = EAGLE_FILES[name]
    found = drafted(write(tmp_path, config, tensors), FEATURES)
    embedding = EMBEDDING if config.get("fusion_bias") is not None else plain["embed_tokens.weight"]
    logits = eagle_states(plain, embedding, FEATURES) @ output.T
    close(found, logits if tokens is None else spread(logits, tokens), 1e-5, 1e-4)


@pytest.mark.parametrize("name", [*EAGLE3_FILES, *EAGLE_FILES])
def test_a_file_that_was_read_and_saved_gives_the_same_head(name, tmp_path):
    config, tensors = (EAGLE3_FILES | EAGLE_FILES)[name][:2]
    head = load_head(write(tmp_path / "head", config, tensors))
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.kind == head.kind
    assert same_weights(again.state_dict(), head.state_dict())
    assert torch.equal(outputs(head), outputs(again))


def test_jetspecs_causal_head_drafts_causally_in_all_layers(tmp_path):
    head = dflash(causal=[True, True])
    model = target("llama")
    config = Z_LAB | {"dflash_config": Z_LAB["dflash_config"] | {"causal_head": True}}
    loaded = load_head(write(tmp_path, config, head.state_dict()))
    close(levels(loaded), plain_dflash(head, model, TEXT), 2e-4, 1e-4)
    assert (levels(loaded) - plain_dflash(dflash(), model, TEXT)).abs().max() > 0.1


def test_aux_layer_l_is_what_the_last_layer_gives_before_the_norm():
    tokens = torch.arange(3, 9)[None]
    layers = EIGHT.layers
    features = EIGHT.features(tokens, (2, 4, layers))
    last = EIGHT.features(tokens)
    norm = EIGHT.decoder.norm
    close(rms_norm(features[..., 64:], (32,), norm.weight, norm.variance_epsilon), last, 1e-5, 1e-4)
    assert torch.equal(features[..., :64], EIGHT.features(tokens, (2, 4)))
    with captured(EIGHT.stack, (layers,)) as inputs:
        EIGHT.decoder(tokens)
    close(inputs[layers], features[..., 64:], 1e-5, 1e-4)


@pytest.mark.parametrize("ids", [[2, 4, 8], None])
def test_a_head_that_reads_the_last_layers_output_fits_its_target(ids, tmp_path):
    nested = {} if ids else {"eagle_config": {IDS: [1, 3, 7]}}
    head = load_head(write(tmp_path, THREE | nested | {IDS: ids}, EAGLE3))
    fit(head, EIGHT, "head")
    assert head.aux_layers == (2, 4, 8)
    assert outputs(head).isfinite().all()
