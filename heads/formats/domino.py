"""Format of Domino heads: SpecForge and NeMo AutoModel.

They are DFlash heads (`formats.dflash`) with `projector_type: domino` in `dflash_config`, and these tensors beside:

    prefix_gru.weight_ih_l0    [3 G, H]         torch's GRU without biases: reset, update and new gate
    prefix_gru.weight_hh_l0    [3 G, G]
    embed_proj.0.weight        [E, H + G]       the state of the block first
    embed_proj.2.weight        [V, E]

G is `gru_hidden_dim`, E `emb_dim`. With `shift_label` the last token's row drafts too. Both projects add the bias from
level `pure_draft_prefix_len` + 1 on, whatever `shift_label` is. With it, they train all rows, and their own loops draft
from all but the last one.
"""

from treespec.heads.formats import fields
from treespec.heads.formats.dflash import read_block
from treespec.heads.formats.dspark import FIRST_NAMES
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.registry import DOMINO_KIND

DOMINO_FIELDS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
SHIFT_FIELD = "shift_label"

NESTED_DOMINO_TABLE = fields.DFLASH_CONFIG_TABLE.extend(
    used=(*DOMINO_FIELDS, SHIFT_FIELD), only={"projector_type": ("domino",)}
)
DOMINO_TABLE = fields.DFLASH_TABLE.extend(
    used=(*DOMINO_FIELDS, SHIFT_FIELD),
    only={"projector_type": ("domino",)},
    nested={"dflash_config": NESTED_DOMINO_TABLE},
)


def read_domino(config: Config, tensors: Tensors) -> Stored:
    """Read a Domino head. Raises ValueError as `read_dflash`."""
    plain = {name.removeprefix(FIRST_NAMES): value for name, value in tensors.items()}
    flat_config, stored = read_block(
        config,
        plain,
        DOMINO_TABLE,
        DOMINO_TABLE,
        nested_fields=(*DOMINO_FIELDS, SHIFT_FIELD),
        drafted_rows=("embed_proj.2.weight",),
    )
    from_anchor = flat_config.pop(SHIFT_FIELD, flat_config.get("sample_from_anchor"))
    return flat_config | {
        "model_type": DOMINO_KIND,
        "sample_from_anchor": bool(from_anchor),
    }, stored
