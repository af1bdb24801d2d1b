"""Directories of block heads as their authors write them, at tiny size, each with a second reading of its formulas."""

import json
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from reference_heads.block import Block, draft_dflash, draft_dflash2, draft_domino, draft_dspark, draft_dspine
from reference_heads.parts import Checkpoint, fill
from torch import Tensor
from torch.nn.functional import normalize
from transformers import Qwen3Config

HIDDEN, VOCAB, BLOCK, LAYERS, HEADS, GROUPS, WIDTH, INNER = 32, 64, 5, 2, 4, 2, 8, 48
IDS = [0, 3, 5]  # the aux layers, as the projects of z-lab's line count them
MASK = 63
RANK = 6
DRAFTED = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:40].sort().values


def list_shapes(**more):
    """The tensors of DFlash, and `more` of them."""
    shapes = {"fc.weight": (HIDDEN, len(IDS) * HIDDEN)}
    shapes |= dict.fromkeys(["hidden_norm.weight", "norm.weight"], (HIDDEN,))
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (GROUPS * WIDTH, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (GROUPS * WIDTH, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
            f"{name}.self_attn.q_norm.weight": (WIDTH,),
            f"{name}.self_attn.k_norm.weight": (WIDTH,),
            f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes | {name.replace("__", "."): shape for name, shape in more.items()}


QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": BLOCK,
    "bos_token_id": 1,
    "dtype": "float64",
    "eos_token_id": 2,
    "head_dim": WIDTH,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 128,
    "max_window_layers": LAYERS,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}


def as_specforge(architecture, dflash=None, **fields):
    """config.json of SpecForge, for instance configs/qwen3-8b-dspark.json."""
    inner = {"mask_token_id": MASK, "target_layer_ids": IDS} | (dflash or {})
    module = architecture.removesuffix("DraftModel").lower()
    names = {"architectures": [architecture], "auto_map": {"AutoModel": f"{module}.{architecture}"}}
    return QWEN3 | names | {"dflash_config": inner} | fields


def as_saved(config):
    """As transformers writes that config beside a checkpoint."""
    return json.loads(Qwen3Config(**config).to_json_string())


def as_speculators(kind, architecture, tokens, drafted=VOCAB, **fields):
    """config.json of speculators: its layers in an object, and its layer ids one more than z-lab's."""
    unused = {"block_size", "num_target_layers", "dtype"}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": {name: value for name, value in QWEN3.items() if name not in unused},
        "draft_vocab_size": drafted,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [number + 1 for number in IDS],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "target_hidden_size": None,
        "dtype": "float64",
        "tie_word_embeddings": False,
        "transformers_version": "5.2.0",
    } | fields


def list_markov(kind, drafted=VOCAB, confidence=True):
    shapes = {"markov_head__markov_w1__weight": (VOCAB, RANK), "markov_head__markov_w2__weight": (drafted, RANK)}
    if kind == "gated":
        shapes |= {"markov_head__gate_proj__weight": (RANK, HIDDEN + RANK), "markov_head__gate_proj__bias": (RANK,)}
    if kind == "rnn":
        shapes |= {
            "markov_head__joint_proj__weight": (3 * RANK, 2 * RANK + HIDDEN),
            "markov_head__joint_proj__bias": (3 * RANK,),
        }
    if confidence:
        shapes |= {"confidence_head__proj__weight": (1, HIDDEN + RANK), "confidence_head__proj__bias": (1,)}
    return list_shapes(**shapes)


def list_convolutions():
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
    }
    for layer in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, 2, HIDDEN)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * 2 * 4, HIDDEN)
    return list_shapes(**shapes)


def list_injection():
    message = 5
    shapes = {
        "injection.message.weight": (message, RANK),
        "injection.receiver_gate.weight": (message, RANK),
        "injection.predecessor_gate.weight": (message, RANK),
        "injection.bias": (message,),
        "transfer_codes": (VOCAB, RANK),
    }
    for layer in range(LAYERS):
        shapes[f"injection.readouts.{layer}.weight"] = (RANK, HIDDEN)
        shapes[f"injection.writes.{layer}.weight"] = (HIDDEN, message)
    return list_shapes(**shapes)


DOMINO_SHAPES = list_shapes(
    prefix_gru__weight_ih_l0=(3 * 7, HIDDEN),
    prefix_gru__weight_hh_l0=(3 * 7, 7),
    embed_proj__0__weight=(9, HIDDEN + 7),
    embed_proj__2__weight=(VOCAB, 9),
)
OWN_ENDS = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 9}
DSPINE = {"transfer_rank": RANK, "message_size": 5, "top_k": 9}
DSPINE_TRAINING = {
    "ce_weight": 0.1,
    "alignment_weight": 0.5,
    "alignment_warmup_steps": 146,
    "replacement_layers": 3,
    "replacement_probability": 0.5,
    "replacement_hold_ratio": 1 / 6,
    "replacement_end_ratio": 1 / 3,
    "candidate_mass_threshold": 1e-4,
}


def markov_fields(kind):
    alpha = {"confidence_head_alpha": 1.0, "attention_mode": "gqa", "projector_type": "dspark"}
    return {"markov_rank": RANK, "markov_head_type": kind} | CONFIDENCE | alpha


def as_deepspec(kind, rank=RANK, confidence=True):
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "num_anchors": 512,
        "enable_confidence_head": confidence,
        "markov_rank": rank,
    }
    if confidence:
        own["confidence_head_with_markov"] = True
    if rank:
        own["markov_head_type"] = kind
    return as_saved(QWEN3 | own)


def domino_fields(pure, shifted):
    sizes = {"emb_dim": 9, "gru_hidden_dim": 7, "projector_type": "domino"}
    return sizes | {"pure_draft_prefix_len": pure, "shift_label": shifted}


def speculators_dspark(kind, from_anchor, drafted=VOCAB):
    fields = {"markov_rank": RANK, "markov_head_type": kind, "sample_from_anchor": from_anchor} | CONFIDENCE
    return as_speculators("dspark", "DSparkDraftModel", BLOCK - (not from_anchor), drafted, **fields)


class BlockFile(NamedTuple):
    """A directory, and what a second reading of it drafts.

    Attributes:
        config: config.json.
        shapes: of the tensors, by their names in the file.
        draft: of `reference_heads.block`, called with a block and a path.
        forms: further fields of `Block`.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    draft: Any
    forms: Mapping[str, bool] = MappingProxyType({})

    def fill(self) -> dict[str, Tensor]:
        tensors = fill(self.shapes)
        if "transfer_codes" in tensors:
            tensors["transfer_codes"] = normalize(tensors["transfer_codes"], dim=-1)
            tensors["transfer_ready"] = torch.tensor(True)
        if "d2t" in self.shapes:
            tensors |= {"d2t": DRAFTED - torch.arange(len(DRAFTED)), "t2d": torch.isin(torch.arange(VOCAB), DRAFTED)}
        return tensors

    def name_path(self, path) -> list[int]:
        """The target's tokens of a path of drafted ones, which few-token heads number on their own."""
        if "d2t" in self.shapes:
            return DRAFTED[list(path)].tolist()
        return list(path)

    def build_block(self, tensors, features, anchor, embedding, output) -> Block:
        """The block behind a text, by the tensors of `fill`. embedding, output: the target's."""
        layers = {name: self.config[name] for name in ("layer_types", "sliding_window") if self.config.get(name)}
        ends = tensors.get("embed_tokens.weight", embedding), tensors.get("lm_head.weight", output)
        return Block(Checkpoint(QWEN3 | layers | DFLASH2, tensors), features, anchor, MASK, *ends, **self.forms)


DSPARK_OF_JUNE = speculators_dspark("vanilla", False) | {"architectures": ["DSparkSpeculator"], "max_anchors": 256}
del DSPARK_OF_JUNE["sample_from_anchor"]
FEW_TOKENS = {"lm_head.weight": (len(DRAFTED), HIDDEN), "d2t": (len(DRAFTED),), "t2d": (VOCAB,)}
CAUSAL = {"causal": True}
PLAIN = list_shapes()
BLOCK_FILES = {
    "dflash": BlockFile(as_specforge("DFlashDraftModel"), PLAIN, draft_dflash),
    "dflash-saved": BlockFile(as_saved(as_specforge("DFlashDraftModel")), PLAIN, draft_dflash),
    "dflash-window": BlockFile(as_specforge("DFlashDraftModel", **WINDOWED), PLAIN, draft_dflash),
    "dflash-causal": BlockFile(
        as_specforge("DFlashDraftModel", is_causal=True, **WINDOWED), PLAIN, draft_dflash, CAUSAL
    ),
    "dflash-window-both-ways": BlockFile(
        as_specforge("DFlashDraftModel", is_causal=False, **WINDOWED), PLAIN, draft_dflash, {"causal": False}
    ),
    "jetspec": BlockFile(as_specforge("DFlashDraftModel", {"causal_head": True}), PLAIN, draft_dflash, CAUSAL),
    "jetspec-both-ways": BlockFile(as_specforge("DFlashDraftModel", {"causal_head": False}), PLAIN, draft_dflash),
    "speculators-dflash": BlockFile(as_speculators("dflash", "DFlashDraftModel", BLOCK - 1), PLAIN, draft_dflash),
    "speculators-dflash-anchor": BlockFile(
        as_speculators("dflash", "DFlashDraftModel", BLOCK, sample_from_anchor=True),
        PLAIN,
        partial(draft_dflash, from_anchor=True),
    ),
    "deepspec-no-markov": BlockFile(
        as_deepspec("vanilla", rank=0, confidence=False), PLAIN | OWN_ENDS, partial(draft_dflash, from_anchor=True)
    ),
    "speculators-dflash2": BlockFile(
        as_speculators("dflash2", "DFlash2DraftModel", BLOCK - 1, **DFLASH2 | {"sliding_window_non_causal": True}),
        list_convolutions(),
        partial(draft_dflash2, count=9),
        {"convolved": True},
    ),
    "speculators-dflash2-anchor": BlockFile(
        as_speculators("dflash2", "DFlash2DraftModel", BLOCK, **DFLASH2 | {"sample_from_anchor": True}),
        list_convolutions(),
        partial(draft_dflash2, count=9, from_anchor=True),
        {"convolved": True},
    ),
    "z-lab-dflash2": BlockFile(
        as_specforge("DFlash2DraftModel", DFLASH2),
        list_convolutions(),
        partial(draft_dflash2, count=9),
        {"convolved": True},
    ),
    "dspine": BlockFile(
        as_specforge("DSpineDraftModel", dspine_config=DSPINE | DSPINE_TRAINING),
        list_injection(),
        partial(draft_dspine, count=9),
        CAUSAL | {"injected": True},
    ),
    # speculators of June 2026 (ff71b1e6) wrote another field for training, and none for the anchor.
    "speculators-dspark-of-june": BlockFile(
        DSPARK_OF_JUNE, list_markov("vanilla"), partial(draft_dspark, kind="vanilla", from_anchor=False)
    ),
    "speculators-dspark-few-tokens": BlockFile(
        speculators_dspark("vanilla", True, len(DRAFTED)),
        list_markov("vanilla", len(DRAFTED)) | FEW_TOKENS,
        partial(draft_dspark, kind="vanilla", from_anchor=True),
    ),
}
for _kind in ("vanilla", "gated", "rnn"):
    _from_anchor = partial(draft_dspark, kind=_kind, from_anchor=True)
    BLOCK_FILES |= {
        f"speculators-dspark-{_kind}-anchor": BlockFile(
            speculators_dspark(_kind, True), list_markov(_kind), _from_anchor
        ),
        f"deepspec-{_kind}": BlockFile(as_deepspec(_kind), list_markov(_kind) | OWN_ENDS, _from_anchor),
        f"specforge-dspark-{_kind}": BlockFile(
            as_specforge("DSparkDraftModel", markov_fields(_kind)), list_markov(_kind), _from_anchor
        ),
    }
    if _kind != "rnn":  # whose memory begins at a row that drafts nothing: refused
        BLOCK_FILES[f"speculators-dspark-{_kind}-masks"] = BlockFile(
            speculators_dspark(_kind, False),
            list_markov(_kind),
            partial(draft_dspark, kind=_kind, from_anchor=False),
        )
for _pure in (0, 1):
    for _place, _shifted in (("shifted", True), ("in-place", False)):
        BLOCK_FILES[f"domino-{_pure}-{_place}"] = BlockFile(
            as_specforge("DominoDraftModel", domino_fields(_pure, _shifted), emb_dim=9),
            DOMINO_SHAPES,
            partial(draft_domino, pure=_pure, shifted=_shifted),
        )
