"""From hidden states to logits, by a model's own output path."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.errors import InputError
from treespec.model.quantised import is_plain, rows_by_forward, sizes_of
from treespec.trees.tree import TokenTree


@dataclass(frozen=True)
class TreeOutput:
    """The target's forward over one tree.

    logits: [N, V].
    features: [N, H] hidden states after the final norm, or [N, taps * H] for a head that taps
    layers.
    rows: [asked, V] logits of the tree's extra rows, if it has any.
    """

    logits: Tensor
    features: Tensor
    rows: Tensor | None = None


def tree_outputs(
    trees: Sequence[TokenTree], logits: Sequence[Tensor], features: Iterable[Tensor]
) -> list[TreeOutput]:
    """The output of each tree, from logits of its nodes and asked rows, and padded features."""
    outputs = []
    for tree, tree_logits, tree_features in zip(trees, logits, features, strict=True):
        n = len(tree.tokens)
        rows = tree_logits[n:] if tree.rows else None
        outputs.append(TreeOutput(tree_logits[:n], tree_features[:n], rows))
    return outputs


def rows_of_output(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> nn.Linear:
    """A copy of the output embedding's rows for the tokens [N], a linear layer H -> N.

    Rows of a quantised output embedding are floats, as its forward unpacks them. device: of the
    hidden states. Raises InputError for one that is offloaded, or is no linear layer.
    """
    # 1. The values by name.
    whole = model.get_output_embeddings()
    start = f"{type(model).__name__} takes no draft vocabulary: its output embedding"
    if isinstance(whole, nn.Linear) and is_plain(whole):
        if whole.weight.is_meta:
            raise InputError(f"{start} is offloaded: give it room on a device")
        named = whole.named_parameters()
        values = {name: value.detach()[tokens.to(value.device)] for name, value in named}
    else:
        try:
            weight, bias = rows_by_forward(whole, tokens, sizes_of(whole)[1], model.dtype, device)
        except (InputError, AttributeError) as error:
            raise InputError(f"{start} is no linear layer") from error
        values = {"weight": weight} | ({"bias": bias} if bool(bias.any()) else {})

    # 2. A layer of them.
    rows = nn.Linear(values["weight"].shape[1], len(tokens), bias="bias" in values, device="meta")
    for name, value in values.items():
        setattr(rows, name, nn.Parameter(value.to(device), requires_grad=False))
    return rows


def scaled(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Logits after the factors and the cap of a config (Cohere, Granite, Gemma)."""
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
