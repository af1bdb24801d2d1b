"""How checkpoints name the tensors of their MTP layers (multi-token prediction: the tokens after the next one).

transformers does not load these tensors. treespec maps them to the same names for every checkpoint:

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
    """The tensors' names in one family of checkpoints.

    Attributes:
        models: the family, for messages.
        start: prefix of the first MTP layer's tensors; {L} stands for the target's number of layers.
        parts: the names after the prefix, in the order of `MTP_PARTS` without the decoder layer.
        block: the decoder layer's prefix after `start`.
        embedding_first: whether the input of `project` is (embedding, hidden state), or the other order.
    """

    models: str
    start: str
    parts: str
    block: str = ""
    embedding_first: bool = True

    def list_prefixes(self, layers: int) -> dict[str, str]:
        """Map each of `MTP_PARTS` to its prefix in the file. layers: L."""
        names = [f"{part}." for part in self.parts.split()]
        names.append(self.block)
        start = self.start.format(L=layers)
        return {part: start + name for part, name in zip(MTP_PARTS, names, strict=True)}


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
        "speculators",
        "mtp_layers.0.",
        "token_layernorm hidden_layernorm input_proj final_layernorm",
    ),
    MtpLayout(
        "MiMo and FastMTP",
        "model.mtp_layers.0.",
        "token_layernorm hidden_layernorm input_proj final_layernorm",
        embedding_first=False,
    ),
)
KNOWN_MTP_MODELS = ", ".join(layout.models for layout in MTP_LAYOUTS)
# Found only in names of MTP layers.
MTP_NAME_PATTERN = re.compile(r"(^|[._])(mtp|nextn)|\.eh_proj\.")
# Copies of the target's tensors.
TARGET_COPY_PATTERN = re.compile(r"\.(embed_tokens|shared_head\.head)\.")
LANGUAGE_MODEL_PREFIX = "language_model."  # prefix in multimodal models


def find_mtp_layer(
    names: Collection[str], layers: int, holder: str = "the target"
) -> tuple[MtpLayout, Mapping[str, str]]:
    """Find the first MTP layer of a checkpoint: its layout, and a map of treespec's tensor names to the file's.

    Args:
        names: the names of the checkpoint's tensors.
        layers: L, the number of the target's decoder layers, without MTP layers.
        holder: the name of what holds the tensors, for messages.

    Raises:
        InputError: for a checkpoint without MTP layers, and for an unknown layout.
    """
    for layout in MTP_LAYOUTS:
        starts = layout.list_prefixes(layers)
        tensors = {}
        for name in names:
            plain = name.replace(LANGUAGE_MODEL_PREFIX, "", 1)
            part = next((key for key in MTP_PARTS if plain.startswith(starts[key])), None)
            if part and not TARGET_COPY_PATTERN.search(name):
                tensors[part + plain.removeprefix(starts[part])] = name
        if any(mtp_name.startswith("block.") for mtp_name in tensors):
            return layout, tensors
    unknown = sorted(name for name in names if MTP_NAME_PATTERN.search(name))
    if unknown:
        raise InputError(
            f"--drafter mtp: {unknown[0]} belongs to an MTP layer of a layout that is not known; known are those "
            f"of {KNOWN_MTP_MODELS}"
        )
    raise InputError(
        f"--drafter mtp: {holder} holds no MTP layer: no tensor such as model.layers.{layers}.eh_proj.weight, "
        "mtp.fc.weight or model.mtp_layers.0.input_proj.weight"
    )
