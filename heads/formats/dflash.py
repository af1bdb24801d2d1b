"""Formats of DFlash heads: z-lab, SpecForge, NeMo AutoModel, ModelOpt, speculators, and JetSpec's causal heads."""

from collections.abc import Collection

from treespec.heads.formats import fields
from treespec.heads.formats.layers import (
    VERIFIER_TENSORS,
    as_qwen3,
    check_window,
    count_layers,
    derive_sizes,
)
from treespec.heads.formats.rotary import read_rotary
from treespec.heads.formats.sglang import from_sglang
from treespec.heads.formats.speculators import flatten_speculators
from treespec.heads.formats.vocabulary import (
    OUTPUT_TENSOR,
    Mapping,
    derive_vocabulary,
    find_vocabulary_size,
    order_rows,
    read_mapping,
)
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING_ATTENTION
from treespec.heads.registry import DFLASH_KIND, SPECULATORS_KIND_FIELD

# Speculators' and treespec's field of the aux layers.
DFLASH_CONFIG_LAYER_IDS = fields.DFLASH_LAYER_IDS
NESTED_FIELDS = ("block_size", "mask_token_id", "sample_from_anchor", "target_hidden_size")


def read_dflash(config: Config, tensors: Tensors) -> Stored:
    """Read a DFlash head. z-lab and SpecForge nest some fields in `dflash_config`, speculators nests the layers.

    Raises ValueError for a part that treespec's head does not have, and for a config without aux layers:
    nothing else says which layers the head was trained on.
    """
    return read_block(config, tensors, fields.DFLASH_TABLE, fields.SPECULATORS_DFLASH_TABLE)


def read_block(
    config: Config,
    tensors: Tensors,
    table: fields.FieldTable,
    speculators_table: fields.FieldTable,
    nested_fields: Collection[str] = (),
    token_rows: Collection[str] = (),
    drafted_rows: Collection[str] = (),
) -> Stored:
    """Read a DFlash head, or one with further parts.

    Args:
        config: the content of config.json.
        tensors: the tensors by the file's names.
        table: the fields of projects with a `dflash_config`.
        speculators_table: the fields of speculators.
        nested_fields: fields that move from `dflash_config` to the top level, besides DFlash's.
        token_rows: names of further tensors with a row for each token of the target.
        drafted_rows: names of further tensors with a row for each draft token, as the output layer has.

    Returns:
        The config and the tensors, their rows in the order of the tokens.

    Raises:
        ValueError: as `read_dflash`, and for a field that differs between its two places.
    """
    # 1. Bring all fields to the top level.
    layers_field = "dflash_config.target_layer_ids"
    if SPECULATORS_KIND_FIELD in config:
        table = speculators_table
        layers_field = DFLASH_CONFIG_LAYER_IDS
    table.check(config)
    nested: Config = config.get("dflash_config") or {}
    flat_config = read_rotary(as_qwen3(flatten_speculators(config)))
    flat_config.pop("dflash_config", None)
    flat_config |= move_nested_fields(config, nested, nested_fields)
    if flat_config.get("attention_bias"):
        raise ValueError("attention_bias is true: a part that treespec's head does not have")

    # 2. Aux layers: `target_layer_ids` names the layers that the features leave.
    ids = nested.get("target_layer_ids")
    if ids:
        flat_config[DFLASH_CONFIG_LAYER_IDS] = from_sglang(ids)
    if not flat_config.get(DFLASH_CONFIG_LAYER_IDS):
        raise ValueError(
            f"{layers_field} is missing: it names the target's layers that the head was trained on, and nothing else "
            "tells them; take it from the head's repository"
        )

    # 3. Derive fields from the tensors.
    tensors = fields.drop_names(tensors, VERIFIER_TENSORS)
    flat_config = count_layers(derive_sizes(flat_config, tensors, "layers.0"), tensors)
    mapping = read_mapping(tensors, find_vocabulary_size(flat_config, tensors))
    flat_config, tensors = derive_vocabulary(flat_config, tensors)
    for name in (*token_rows, *drafted_rows):
        if name in tensors:
            order = mapping
            if name in token_rows:
                order = Mapping()
            tensors[name] = order_rows(tensors[name], order, flat_config["vocab_size"], name)
    flat_config = derive_windows(flat_config, config, nested)
    return flat_config | {
        "model_type": DFLASH_KIND,
        "own_output": OUTPUT_TENSOR in tensors,
    }, tensors


def move_nested_fields(config: Config, nested: Config, names: Collection[str]) -> Config:
    """The fields of `dflash_config` that move to the top level.

    Args:
        config: config.json.
        nested: its `dflash_config`.
        names: of the fields besides DFlash's. Raises ValueError for one that differs between its two places.
    """
    for name, value in fields.select_names(nested, names).items():
        outer = config.get(name)
        if outer is not None and outer != value:
            raise ValueError(
                f"{name} is {outer!r}, and dflash_config.{name} is {value!r}: one head cannot be both"
            )
    return fields.select_names(nested, (*NESTED_FIELDS, *names))


def derive_windows(flat_config: Config, config: Config, nested: Config) -> Config:
    """Add the window and the causality of each layer, as vLLM reads them.

    JetSpec's `causal_head` makes all layers causal: no block row sees a later one.

    Args:
        flat_config: the fields at the top level so far.
        config: config.json.
        nested: its `dflash_config`.

    Returns:
        `flat_config` with `layer_types`, `sliding_window` and `causal`, if the head needs them.
    """
    layers = int(flat_config.get("num_hidden_layers", 1))
    causal = read_causality(config, nested)
    if nested.get("use_swa") and SLIDING_ATTENTION not in (flat_config.get("layer_types") or ()):
        flat_config = flat_config | {"layer_types": [SLIDING_ATTENTION] * layers}
        causal = bool(causal)
    if "swa_window_size" in nested:
        flat_config = flat_config | {"sliding_window": nested["swa_window_size"]}
    check_window(flat_config)
    check_window_of_block(flat_config)
    if config.get("sliding_window_non_causal"):
        causal = False
    if causal is not None:
        flat_config = flat_config | {"causal": [bool(causal)] * layers}
    return flat_config


def check_window_of_block(config: Config) -> None:
    """Raises ValueError for a window shorter than a block: SpecForge does not apply it within a block, vLLM does."""
    window = config.get("sliding_window")
    size = config.get("block_size")
    types = config.get("layer_types")
    if not window or not size or not types or SLIDING_ATTENTION not in types:
        return
    if window < size:
        raise ValueError(
            f"sliding_window is {window}, and block_size {size}: projects disagree on whether rows of a block that "
            "far apart see each other"
        )


def read_causality(config: Config, nested: Config) -> bool | None:
    """Whether the blocks are causal, by the fields of three projects; None: all are absent.

    Raises ValueError for fields that contradict each other.
    """
    values = {
        "is_causal": config.get("is_causal"),
        "dflash_config.causal": nested.get("causal"),
        "dflash_config.causal_head": nested.get("causal_head"),
    }
    flags = {name: bool(value) for name, value in values.items() if value is not None}
    if not flags:
        return None
    if len(set(flags.values())) > 1:
        words = " and ".join(f"{name} is {value}" for name, value in flags.items())
        raise ValueError(f"{words}: one head cannot be both")
    return True in flags.values()
