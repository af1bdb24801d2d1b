"""Format of DSpine heads: SpecForge, with which its converter writes Tencent's.

They are causal DFlash heads (`formats.dflash`) with these tensors beside, of rank r and messages of width M:

    injection.readouts.N.weight              [r, H], of each layer
    injection.writes.N.weight                [H, M], of each layer
    injection.message.weight                 [M, r]
    injection.receiver_gate.weight           [M, r]
    injection.predecessor_gate.weight        [M, r]
    injection.bias                           [M]
    transfer_codes                           [V, r]
    transfer_ready                           true

`dspine_config` has r as `transfer_rank`, M as `message_size`, and `top_k`. Tencent's own directories have the codes in
a file of their own: they are refused, because `transfer_codes` is missing.
"""

from treespec.heads.formats import fields
from treespec.heads.formats.dflash import read_block
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.registry import DSPINE_KIND

PART_FIELDS = ("transfer_rank", "message_size", "top_k")
DEFAULTS = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}  # SpecForge's
TRAINING_FIELDS = fields.split_names("""
    ce_weight alignment_weight alignment_warmup_steps replacement_layers replacement_probability
    replacement_hold_ratio replacement_end_ratio candidate_mass_threshold
    """)
PART_FIELD = "dspine_config"
CODES = "transfer_codes"
READY = "transfer_ready"
IS_CAUSAL = {"causal": (True,), "causal_head": (True,), "is_causal": (True,)}
ANCHOR_DRAFTS_NOTHING = {"sample_from_anchor": (False,)}

DSPINE_TABLE = fields.DFLASH_TABLE.extend(
    used=PART_FIELDS,
    only={
        "projector_type": ("dspine",),
        "is_causal": (True,),
        "sliding_window_non_causal": (False,),
    }
    | ANCHOR_DRAFTS_NOTHING,
    nested={
        "dflash_config": fields.DFLASH_CONFIG_TABLE.extend(
            only={"projector_type": ("dspine",)} | IS_CAUSAL | ANCHOR_DRAFTS_NOTHING
        ),
        PART_FIELD: fields.FieldTable(used=frozenset(PART_FIELDS), unused=TRAINING_FIELDS),
    },
)


def read_dspine(config: Config, tensors: Tensors) -> Stored:
    """Read a DSpine head. Raises ValueError as `read_dflash`, and for codes that were not computed."""
    renamed = dict(tensors)
    ready = renamed.pop(READY, None)
    if ready is not None and not bool(ready):
        raise ValueError(f"{READY} is false: the codes of the tokens were not computed")
    if CODES in renamed:
        renamed[f"{CODES}.weight"] = renamed.pop(CODES)
    flat_config, stored = read_block(
        config, renamed, DSPINE_TABLE, DSPINE_TABLE, token_rows=(f"{CODES}.weight",)
    )
    part = flat_config.pop(PART_FIELD, None) or {}
    sizes = DEFAULTS | fields.select_names(part, PART_FIELDS)
    return sizes | flat_config | {"model_type": DSPINE_KIND}, stored
