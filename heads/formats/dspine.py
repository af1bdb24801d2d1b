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

DSPINE_FIELDS = ("transfer_rank", "message_size", "top_k")
DSPINE_DEFAULTS = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}  # SpecForge's
DSPINE_TRAINING_FIELDS = fields.split_names("""
    ce_weight alignment_weight alignment_warmup_steps replacement_layers replacement_probability
    replacement_hold_ratio replacement_end_ratio candidate_mass_threshold
    """)
DSPINE_OBJECT = "dspine_config"
CODES_TENSOR = "transfer_codes"
READY_TENSOR = "transfer_ready"
IS_CAUSAL = {"causal": (True,), "causal_head": (True,), "is_causal": (True,)}
ANCHOR_DRAFTS_NOTHING = {"sample_from_anchor": (False,)}

DSPINE_TABLE = fields.DFLASH_TABLE.extend(
    used=DSPINE_FIELDS,
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
        DSPINE_OBJECT: fields.FieldTable(
            used=frozenset(DSPINE_FIELDS), unused=DSPINE_TRAINING_FIELDS
        ),
    },
)


def read_dspine(config: Config, tensors: Tensors) -> Stored:
    """Read a DSpine head. Raises ValueError as `read_dflash`, and for codes that were not computed."""
    renamed = dict(tensors)
    ready = renamed.pop(READY_TENSOR, None)
    if ready is not None and not bool(ready):
        raise ValueError(f"{READY_TENSOR} is false: the codes of the tokens were not computed")
    if CODES_TENSOR in renamed:
        renamed[f"{CODES_TENSOR}.weight"] = renamed.pop(CODES_TENSOR)
    flat_config, stored = read_block(
        config, renamed, DSPINE_TABLE, DSPINE_TABLE, token_rows=(f"{CODES_TENSOR}.weight",)
    )
    sizes = dict(DSPINE_DEFAULTS)
    part = flat_config.pop(DSPINE_OBJECT, None)
    if part:
        sizes |= fields.select_names(part, DSPINE_FIELDS)
    return sizes | flat_config | {"model_type": DSPINE_KIND}, stored
