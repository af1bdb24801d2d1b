"""How checkpoints name the tensors of their MTP layers, which predict the tokens after the next.

transformers leaves these tensors unloaded. Here each has one of these names, in any checkpoint:

    token_norm.  hidden_norm.  project.  final_norm.     around the decoder layer
    block.                                               the decoder layer itself
    embedding.  head.                                    its own copies of the target's, if any
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The names of one family of checkpoints.

    models: for messages. layer: before the names of layer number N. follows: whether N goes on
    after the target's own layers; otherwise it starts at 0. starts: ours -> the file's start of a
    name, `{layer}` being `layer`; `block.` comes last, as it takes all other names of a layer. A
    start without `{layer}` belongs to all layers.
    embedding_first: whether `project` takes the embedding before the hidden state.
    """

    models: str
    layer: str
    follows: bool
    starts: Mapping[str, str]
    embedding_first: bool = True

    def starts_of(self, number: int) -> dict[str, str]:
        """`starts` for layer number N."""
        layer = self.layer.format(N=number)
        return {ours: theirs.format(layer=layer) for ours, theirs in self.starts.items()}


LAYOUTS = (
    Layout(
        "DeepSeek-V3 and GLM-4.5",
        "model.layers.{N}.",
        True,
        {
            "token_norm.": "{layer}enorm.",
            "hidden_norm.": "{layer}hnorm.",
            "project.": "{layer}eh_proj.",
            "final_norm.": "{layer}shared_head.norm.",
            "head.": "{layer}shared_head.head.",
            "embedding.": "{layer}embed_tokens.",
            "block.": "{layer}",
        },
    ),
    Layout(
        "Qwen3-Next and Qwen3.5",
        "mtp.layers.{N}.",
        False,
        {
            "token_norm.": "mtp.pre_fc_norm_embedding.",
            "hidden_norm.": "mtp.pre_fc_norm_hidden.",
            "project.": "mtp.fc.",
            "final_norm.": "mtp.norm.",
            "block.": "{layer}",
        },
    ),
    Layout(
        "MiMo",
        "model.mtp_layers.{N}.",
        False,
        {
            "token_norm.": "{layer}token_layernorm.",
            "hidden_norm.": "{layer}hidden_layernorm.",
            "project.": "{layer}input_proj.",
            "final_norm.": "{layer}final_layernorm.",
            "block.": "{layer}",
        },
        embedding_first=False,
    ),
)
KNOWN = ", ".join(layout.models for layout in LAYOUTS)
MARK = re.compile(r"(^|[._])(mtp|nextn)|\.eh_proj\.")  # in names that only MTP layers have
WITHIN = "language_model."  # in the names of a multimodal model


@dataclass(frozen=True)
class LayerNames:
    """One MTP layer. tensors: our name of each -> the file's. starts: as `Layout.starts_of`."""

    tensors: Mapping[str, str]
    starts: Mapping[str, str]

    def in_file(self, name: str) -> str:
        """The file's name of a tensor, whether the file has it or not. name: ours."""
        if name in self.tensors:
            return self.tensors[name]
        ours = next(ours for ours in self.starts if name.startswith(ours))
        return self.starts[ours] + name.removeprefix(ours)


def mtp_layers(names: Collection[str], layers: int) -> tuple[Layout, list[LayerNames]]:
    """The MTP layers among a checkpoint's tensors. layers: of the target itself.

    Raises ValueError for a checkpoint without any, and for a layout that is not known, with the
    name of a tensor.
    """
    in_file = {name.replace(WITHIN, "", 1): name for name in names}
    for layout in LAYOUTS:
        # 1. Layer after layer, while there are names of it. A name is of the first start it has.
        found: list[LayerNames] = []
        number = layers if layout.follows else 0
        while any(name.startswith(layout.starts_of(number)["block."]) for name in in_file):
            starts, tensors = layout.starts_of(number), {}
            for plain, name in in_file.items():
                if ours := [key for key, start in starts.items() if plain.startswith(start)]:
                    tensors[ours[0] + plain.removeprefix(starts[ours[0]])] = name
            found.append(LayerNames(tensors, starts))
            number += 1

        # 2. No other tensor of theirs is left over.
        if found:
            known = {name for layer in found for name in layer.tensors.values()}
            refuse_unknown(set(in_file.values()) - known)
            return layout, found
    refuse_unknown(in_file.values())
    raise ValueError(
        f"it holds no MTP layer: no tensor such as model.layers.{layers}.eh_proj.weight, "
        "mtp.fc.weight or model.mtp_layers.0.input_proj.weight"
    )


def refuse_unknown(names: Collection[str]) -> None:
    """Raises ValueError for the first name that only an MTP layer has."""
    if unknown := sorted(name for name in names if MARK.search(name)):
        raise ValueError(
            f"{unknown[0]} belongs to an MTP layer of a layout that is not known; known are those "
            f"of {KNOWN}"
        )
