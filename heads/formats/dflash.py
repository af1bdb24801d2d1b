"""DFlash's heads: z-lab's, SpecForge's, NeMo AutoModel's, ModelOpt's, speculators', and JetSpec's causal ones."""

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
from treespec.heads.formats.vocabulary import OUTPUT_TENSOR, derive_vocabulary
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING_ATTENTION
from treespec.heads.registry import DFLASH_KIND, SPECULATORS_KIND_FIELD

DFLASH_CONFIG_LAYER_IDS = fields.DFLASH_LAYER_IDS  # in speculators and treespec
NESTED_FIELDS = ("block_size", "mask_token_id", "sample_from_anchor", "target_hidden_size")


def read_dflash(config: Config, tensors: Tensors) -> Stored:
    """z-lab and SpecForge nest fields in `dflash_config`, speculators the layers.

    Raises ValueError for a part that treespec's head does not have, and for a config that does not
    name the target's layers: which ones a head was trained on cannot be computed.
    """
    # 1. One object of fields.
    table = fields.DFLASH_TABLE
    layers_field = "dflash_config.target_layer_ids"
    if SPECULATORS_KIND_FIELD in config:
        table = fields.SPECULATORS_DFLASH_TABLE
        layers_field = DFLASH_CONFIG_LAYER_IDS
    table.check(config)
    nested: Config = config.get("dflash_config") or {}
    settled = read_rotary(as_qwen3(flatten_speculators(config)))
    settled.pop("dflash_config", None)
    settled |= fields.select_names(nested, NESTED_FIELDS)
    if settled.get("attention_bias"):
        raise ValueError("attention_bias is true: a part that treespec's head does not have")

    # 2. Aux layers: those that the features leave.
    ids = nested.get("target_layer_ids")
    if ids:
        settled[DFLASH_CONFIG_LAYER_IDS] = from_sglang(ids)
    if not settled.get(DFLASH_CONFIG_LAYER_IDS):
        raise ValueError(
            f"{layers_field} is missing: it names the target's layers that the head was trained on, and nothing else "
            "tells them; take it from the head's repository"
        )

    # 3. What the tensors tell.
    tensors = fields.drop_names(tensors, VERIFIER_TENSORS)
    settled = count_layers(derive_sizes(settled, tensors, "layers.0"), tensors)
    settled, tensors = derive_vocabulary(settled, tensors)
    settled = derive_windows(settled, config, nested)
    return settled | {"model_type": DFLASH_KIND, "own_output": OUTPUT_TENSOR in tensors}, tensors


def derive_windows(settled: Config, config: Config, nested: Config) -> Config:
    """The fields with the window and the causality of each layer, as vLLM reads them.

    `causal_head` is JetSpec's: within a block no row sees a later one, in any layer.
    """
    layers = int(settled.get("num_hidden_layers", 1))
    causal = read_causality(config, nested)
    if nested.get("use_swa") and SLIDING_ATTENTION not in (settled.get("layer_types") or ()):
        settled = settled | {"layer_types": [SLIDING_ATTENTION] * layers}
        causal = bool(causal)
    if "swa_window_size" in nested:
        settled = settled | {"sliding_window": nested["swa_window_size"]}
    check_window(settled)
    if config.get("sliding_window_non_causal"):
        causal = False
    if causal is not None:
        settled = settled | {"causal": [bool(causal)] * layers}
    return settled


def read_causality(config: Config, nested: Config) -> bool | None:
    """Whether the blocks are causal, by the field that says so; None: no field does.

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
