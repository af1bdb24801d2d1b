"""How checkpoints name the tensors of their MTP layers, which predict the tokens after the next.

transformers leaves these tensors unloaded. Here each has one of these names, in any checkpoint:

    token_norm.  hidden_norm.  project.  final_norm.     around the decoder layer
    block.                                               the decoder layer itself
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from treespec.errors import InputError

MTP_PARTS = "token_norm.", "hidden_norm.", "project.", "final_norm.", "block."


@dataclass(frozen=True)
class MtpLayout:
    """The names of one family of checkpoints.

    models: for messages. start: before the names of the first MTP layer, behind the target's L
    layers. parts: the names after it, in the order of PARTS. block: the names of the decoder layer follow
    it. embedding_first: whether `project` takes the embedding before the hidden state.
    """

    models: str
    start: str
    parts: str
    block: str = ""
    embedding_first: bool = True

    def list_prefixes(self, layers: int) -> dict[str, str]:
        """Our start of a name -> the file's. layers: L."""
        names = [f"{part}." for part in self.parts.split()]
        names.append(self.block)
        start = self.start.format(L=layers)
        return {ours: start + name for ours, name in zip(MTP_PARTS, names, strict=True)}


MTP_LAYOUTS = (
    MtpLayout(
        "DeepSeek-V3 and GLM-4.5", "model.layers.{L}.", "enorm hnorm eh_proj shared_head.norm"
    ),
    MtpLayout(
        "Qwen3-Next and Qwen3.5",
        "mtp.",
        "pre_fc_norm_embedding pre_fc_norm_hidden fc norm",
        "layers.0.",
    ),
    MtpLayout(
        "MiMo",
        "model.mtp_layers.0.",
        "token_layernorm hidden_layernorm input_proj final_layernorm",
        embedding_first=False,
    ),
)
KNOWN_MTP_MODELS = ", ".join(layout.models for layout in MTP_LAYOUTS)
MTP_NAME_PATTERN = re.compile(
    r"(^|[._])(mtp|nextn)|\.eh_proj\."
)  # in names that only MTP layers have
TARGET_COPY_PATTERN = re.compile(r"\.(embed_tokens|shared_head\.head)\.")  # copies of the target's
LANGUAGE_MODEL_PREFIX = "language_model."  # in the names of a multimodal model


def find_mtp_layer(names: Collection[str], layers: int) -> tuple[MtpLayout, Mapping[str, str]]:
    """The first MTP layer in a checkpoint: its layout, and our name of each tensor -> the file's.

    layers: of the target itself. Raises InputError for a checkpoint without any, and for a layout
    that is not known, with the name of a tensor.
    """
    for layout in MTP_LAYOUTS:
        starts = layout.list_prefixes(layers)
        tensors = {}
        for name in names:
            plain = name.replace(LANGUAGE_MODEL_PREFIX, "", 1)
            ours = next((key for key in MTP_PARTS if plain.startswith(starts[key])), None)
            if ours and not TARGET_COPY_PATTERN.search(name):
                tensors[ours + plain.removeprefix(starts[ours])] = name
        if any(ours.startswith("block.") for ours in tensors):
            return layout, tensors
    unknown = sorted(name for name in names if MTP_NAME_PATTERN.search(name))
    if unknown:
        raise InputError(
            f"--drafter mtp: {unknown[0]} belongs to an MTP layer of a layout that is not known; known are those "
            f"of {KNOWN_MTP_MODELS}"
        )
    raise InputError(
        f"--drafter mtp: the target holds no MTP layer: no tensor such as model.layers.{layers}.eh_proj.weight, "
        "mtp.fc.weight or model.mtp_layers.0.input_proj.weight"
    )
