"""Block heads of other projects: DFlash of z-lab, SpecForge and speculators, P-EAGLE of both last.

DFlash numbers the tapped layers in two ways, as EAGLE-3 does: speculators names the layer that a
tap enters, z-lab and SpecForge the layer that it leaves.
"""

from treespec.heads.formats import eagle3
from treespec.heads.formats.engines import without_whole_map
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING
from treespec.heads.levels import p_eagle_levels
from treespec.heads.p_eagle import INNER
from treespec.heads.registry import DFLASH, KIND, P_EAGLE

VERIFIERS = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's, not used


def read_dflash(config: Config, tensors: Tensors) -> Stored:
    """treespec's fields of a DFlash head. Raises ValueError for a part that it does not have."""
    if config.get("model_type") == DFLASH:
        return config, tensors

    # 1. The fields, which speculators nests; those of z-lab are of Qwen3.
    tensors = {name: value for name, value in tensors.items() if name not in VERIFIERS}
    fields = _of_speculators(config) if KIND in config else _of_z_lab(config)
    for name in ("attention_bias", "attention_sink_bias", "add_swa_attention_sink_bias"):
        if fields.get(name):
            raise ValueError(f"{name} is {fields[name]}: a bias that treespec's head does not have")
    if fields.get("is_neox_style") is False:
        raise ValueError("is_neox_style is false: treespec rotates halves, not neighbours")

    # 2. The output layer of its own, and its tokens.
    fields["own_output"] = "lm_head.weight" in tensors
    tensors = without_whole_map(tensors)
    drafted, known = fields.get("draft_vocab_size"), fields.get("vocab_size")
    if drafted not in (None, known) and not fields["own_output"]:
        raise ValueError(f"draft_vocab_size is {drafted}, and lm_head.weight is missing")
    return fields | {"model_type": DFLASH}, tensors


def _of_speculators(config: Config) -> Config:
    """A nested config of speculators, whose layers with a window are causal unless it says so."""
    own = ("block_size", "mask_token_id", "draft_vocab_size", "sample_from_anchor")
    fields = eagle3.as_qwen3(eagle3.nested_layer(config))
    fields |= {name: config[name] for name in own if name in config}
    if config.get("target_hidden_size"):
        fields["target_hidden_size"] = config["target_hidden_size"]
    if config.get("sliding_window_non_causal"):
        fields["causal"] = [False] * int(fields.get("num_hidden_layers", 1))
    return _checked(fields | {"taps": config.get("aux_hidden_state_layer_ids")})


def _of_z_lab(config: Config) -> Config:
    """A config of z-lab or SpecForge, with `dflash_config` inside."""
    # 1. The nested fields.
    nested = config.get("dflash_config") or {}
    if (kind := nested.get("projector_type") or DFLASH) != DFLASH:
        raise ValueError(f"projector_type is {kind!r}, of which only 'dflash' is known")
    if nested.get("shift_label") or nested.get("pure_draft_prefix_len"):
        raise ValueError("shift_label or pure_draft_prefix_len is set, which is not known")
    fields = eagle3.as_qwen3({k: v for k, v in config.items() if k != "dflash_config"})
    for name in ("block_size", "mask_token_id", "attention_sink_bias"):
        if name in nested:
            fields[name] = nested[name]

    # 2. Windows, and which layers are causal.
    layers = int(fields.get("num_hidden_layers", 1))
    if nested.get("use_swa") and SLIDING not in (fields.get("layer_types") or ()):
        fields["layer_types"] = [SLIDING] * layers
        fields["causal"] = [False] * layers
    if "swa_window_size" in nested:
        fields["sliding_window"] = nested["swa_window_size"]
    causal = config.get("is_causal", nested.get("causal"))
    if causal is not None:
        fields["causal"] = [bool(causal)] * layers

    # 3. Taps: the layers that the features leave, evenly spaced if it names none.
    ids = nested.get("target_layer_ids")
    if ids is None and config.get("num_target_layers"):
        ids = spaced(int(config["num_target_layers"]), layers)
    return _checked(fields | {"taps": eagle3.from_sglang(ids) if ids else None})


def spaced(target_layers: int, layers: int) -> list[int]:
    """The layers of a target that z-lab taps for a head of so many layers."""
    if layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (layers - 1)) for i in range(layers)]


def _checked(fields: Config) -> Config:
    """Raises ValueError for a field that is missing."""
    for name in ("taps", "mask_token_id", "block_size"):
        if fields.get(name) is None:
            words = "the layers that it taps" if name == "taps" else name
            raise ValueError(f"config.json does not tell {words}, which a DFlash head needs")
    return fields


def read_p_eagle(config: Config, tensors: Tensors) -> Stored:
    """treespec's fields of a P-EAGLE head. Raises ValueError as EAGLE-3's readers do."""
    if config.get("model_type") == P_EAGLE:
        return config, tensors

    # 1. What EAGLE-3 does not have.
    tensors = {name: value for name, value in tensors.items() if name not in VERIFIERS}
    if "mask_hidden" not in tensors:
        raise ValueError("the head lacks mask_hidden; is it a P-EAGLE head?")
    mask_hidden, token = tensors.pop("mask_hidden"), config.get("mask_token_id")
    if token is None:
        raise ValueError(
            "config.json does not tell mask_token_id: add the token that the head was trained with"
        )

    # 2. EAGLE-3's part.
    kind = {KIND: "eagle3"} if KIND in config else {}
    fields, inner = eagle3.read(config | kind, tensors)
    fields |= {"model_type": P_EAGLE, "mask_token_id": token, "levels": p_eagle_levels(config)}
    return fields, {"mask_hidden": mask_hidden} | {INNER + name: inner[name] for name in inner}
