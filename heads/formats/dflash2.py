"""Formats of DFlash 2 heads: z-lab, SpecForge, NeMo AutoModel and speculators.

They are DFlash heads (`formats.dflash`) with these tensors beside, with kernels of size K and groups of
`conv_group_size` channels:

    layers.N.attention_conv.base_kernel                  [2, K, H]              before and behind the attention
    layers.N.attention_conv.kernel_projection.weight     [2 K H / group, H]     side, offset, group
    layers.N.mlp_conv.*                                  the same, of the MLP
    candidate_selector.predecessor_codebook              [V, r]
    candidate_selector.successor_codebook                [V, r]
    candidate_selector.hidden_projection.weight          [r, H]

`conv_kernel_size`, `conv_group_size`, `selector_rank` and `selector_top_k` stand in `dflash_config`, in speculators at
the top level. There a block with windows is not causal if `sliding_window_non_causal` is absent.
"""

from treespec.heads.formats import fields
from treespec.heads.formats.dflash import read_block
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.registry import DFLASH2_KIND, SPECULATORS_KIND_FIELD

DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SELECTOR_PREFIX = "candidate_selector."
PREDECESSOR_ROWS = f"{SELECTOR_PREFIX}predecessor_codebook"
SUCCESSOR_ROWS = f"{SELECTOR_PREFIX}successor_codebook"
# Factors and caps on what the target computes: the projects apply them to its output layer alone, without the target's.
NEUTRAL_FACTORS = {
    "output_multiplier": (1,),
    "input_embedding_scale": (1,),
    "final_logit_softcapping": (0,),
}

NESTED_DFLASH2_TABLE = fields.DFLASH_CONFIG_TABLE.extend(used=DFLASH2_FIELDS, only=NEUTRAL_FACTORS)
DFLASH2_TABLE = fields.DFLASH_TABLE.extend(
    used=DFLASH2_FIELDS, only=NEUTRAL_FACTORS, nested={"dflash_config": NESTED_DFLASH2_TABLE}
)
SPECULATORS_DFLASH2_TABLE = fields.SPECULATORS_DFLASH_TABLE.extend(
    used=DFLASH2_FIELDS,
    only=NEUTRAL_FACTORS | {SPECULATORS_KIND_FIELD: (DFLASH2_KIND,)},
)


def read_dflash2(config: Config, tensors: Tensors) -> Stored:
    """Read a DFlash 2 head. Raises ValueError as `read_dflash`."""
    if SPECULATORS_KIND_FIELD in config:
        config = {"sliding_window_non_causal": True} | config
    renamed = dict(tensors)
    for name in (PREDECESSOR_ROWS, SUCCESSOR_ROWS):
        if name in renamed:
            renamed[f"{name}.weight"] = renamed.pop(name)
    flat_config, stored = read_block(
        config,
        renamed,
        DFLASH2_TABLE,
        SPECULATORS_DFLASH2_TABLE,
        nested_fields=DFLASH2_FIELDS,
        token_rows=(f"{PREDECESSOR_ROWS}.weight",),
        drafted_rows=(f"{SUCCESSOR_ROWS}.weight",),
    )
    return flat_config | {"model_type": DFLASH2_KIND}, stored
