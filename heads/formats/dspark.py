"""Formats of DSpark heads: DeepSpec, NeMo AutoModel, SpecForge and speculators.

All are DFlash heads (`formats.dflash`) with these tensors beside:

    markov_head.markov_w1.weight           [V, r]
    markov_head.markov_w2.weight           [N, r], a row for each row of lm_head; V rows if there is no lm_head
    markov_head.gate_proj.{weight,bias}    [r, H + r], of type "gated"
    markov_head.joint_proj.{weight,bias}   [3 r, 2 r + H], of type "rnn"
    confidence_head.proj.{weight,bias}     [1, H], or [1, H + r] with `confidence_head_with_markov`

SpecForge's first files have `logit_head.` before these names.

| | DeepSpec, NeMo AutoModel | SpecForge | speculators |
|---|---|---|---|
| `architectures` | Qwen3DSparkModel | DSparkDraftModel | DSparkSpeculator, DSparkDraftModel |
| DSpark's fields | at the top level | in `dflash_config` | at the top level |
| layers that the features leave | `target_layer_ids` at the top level | in `dflash_config` | those they enter |
| the last token's row drafts | yes | yes | `sample_from_anchor` |

Which row drafts which token is the convention that nothing in the tensors shows. Positions of a block of four
after the last token e; a misread head drafts each token one place off:

    row                        e    m    m    m
    sample_from_anchor         1    2    3    4       the level that it drafts
    without                    -    1    2    3

DeepSpec and SpecForge train the first, and SGLang serves it; neither writes the field. speculators writes it since
13 July 2026 (a0be7bb6). It trained the second before, and wrote `speculative_tokens` one less than `block_size`.
"""

from treespec.heads.formats import fields
from treespec.heads.formats.dflash import read_block
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.registry import DSPARK_KIND, SPECULATORS_KIND_FIELD

MARKOV_FIELDS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
CONFIDENCE_WEIGHT = "confidence_head_alpha"  # of its loss
DEEPSPEC_LAYERS_FIELD = "target_layer_ids"
FIRST_NAMES = "logit_head."

NESTED_DSPARK_TABLE = fields.DFLASH_CONFIG_TABLE.extend(
    used=MARKOV_FIELDS,
    unused=(CONFIDENCE_WEIGHT,),
    only={"projector_type": ("dspark",), "attention_mode": ("gqa", "mha")},
)
DSPARK_TABLE = fields.DFLASH_TABLE.extend(
    used=(*MARKOV_FIELDS, DEEPSPEC_LAYERS_FIELD),
    unused=(CONFIDENCE_WEIGHT,),
    only={"projector_type": ("dspark",)},
    nested={"dflash_config": NESTED_DSPARK_TABLE},
)
SPECULATORS_DSPARK_TABLE = fields.SPECULATORS_DFLASH_TABLE.extend(
    used=MARKOV_FIELDS,
    only={"projector_type": ("dspark",), SPECULATORS_KIND_FIELD: ("dspark",)},
)


def read_dspark(config: Config, tensors: Tensors) -> Stored:
    """Read a DSpark head. Raises ValueError as `read_dflash`, and for a convention of rows that nothing tells."""
    plain = {name.removeprefix(FIRST_NAMES): value for name, value in tensors.items()}
    flat_config, stored = read_block(
        move_layers(config),
        plain,
        DSPARK_TABLE,
        SPECULATORS_DSPARK_TABLE,
        nested_fields=MARKOV_FIELDS,
        token_rows=("markov_head.markov_w1.weight",),
        drafted_rows=("markov_head.markov_w2.weight",),
    )
    return flat_config | {
        "model_type": DSPARK_KIND,
        "sample_from_anchor": read_convention(config),
    }, stored


def move_layers(config: Config) -> Config:
    """Move DeepSpec's `target_layer_ids` into `dflash_config`, where SpecForge has them.

    Raises ValueError if both places name layers, and other ones.
    """
    nested = config.get("dflash_config", {})
    ids = config.get(DEEPSPEC_LAYERS_FIELD)
    if not ids or not isinstance(nested, dict):
        return config
    nested_ids = nested.get(DEEPSPEC_LAYERS_FIELD, ids)
    if nested_ids != ids:
        name = DEEPSPEC_LAYERS_FIELD
        raise ValueError(
            f"{name} is {ids}, and dflash_config.{name} is {nested_ids}: one head cannot read both"
        )
    moved = fields.drop_names(config, (DEEPSPEC_LAYERS_FIELD,))
    return moved | {"dflash_config": nested | {DEEPSPEC_LAYERS_FIELD: ids}}


def read_convention(config: Config) -> bool:
    """Whether the last token's row drafts too.

    Raises ValueError for a file of speculators that does not say it, and whose number of drafts does not tell.
    """
    places = [config]
    if config.get("dflash_config"):
        places.append(config["dflash_config"])
    for place in places:
        if place.get("sample_from_anchor") is not None:
            return bool(place["sample_from_anchor"])
    if SPECULATORS_KIND_FIELD not in config:
        return True
    size = config.get("block_size")
    drafted = None
    served = config.get("speculators_config")
    if served and served.get("proposal_methods"):
        drafted = served["proposal_methods"][0].get("speculative_tokens")
    if drafted is not None and size is not None and drafted in (size, size - 1):
        return bool(drafted == size)
    raise ValueError(
        f"sample_from_anchor is missing, block_size is {size} and speculative_tokens is {drafted}: if the head drafts "
        "block_size tokens, add true, and if it drafts one less, false"
    )
