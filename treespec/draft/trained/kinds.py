"""The kinds of trained heads: untrained ones for a target, and what drafts with them.

A row of `treespec.draft.drafters` in a package names its own kind as `family`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from treespec.draft.drafters import DRAFTERS
from treespec.draft.trained.pairs import PairProposer
from treespec.draft.trained.proposers import (
    BlockProposer,
    EagleProposer,
    HydraProposer,
    MedusaProposer,
)
from treespec.draft.vocabulary import whole
from treespec.errors import InputError
from treespec.heads import eagle, eagle3
from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.features import FeatureHead
from treespec.heads.head import Config, Head
from treespec.heads.hydra import ARCHITECTURES, HydraHead
from treespec.heads.medusa import MedusaHead
from treespec.heads.p_eagle import PEagleHead
from treespec.model.quantised import is_plain, table_of
from treespec.model.target import Target

H = TypeVar("H", bound=Head)
F = TypeVar("F", bound=FeatureHead)


def embedding_of(target: Target) -> nn.Parameter:
    """[V, E] the target's embedding; a copy in floats where that is quantised.

    Raises InputError if it is offloaded.
    """
    embedding = target.model.get_input_embeddings()
    table = table_of(on_a_device(embedding, "embedding"))
    return table if isinstance(table, nn.Parameter) else nn.Parameter(table, requires_grad=False)


def on_a_device(embedding: Any, what: str) -> Any:
    """An embedding of the target. Raises InputError for an offloaded one."""
    if embedding.weight.is_meta:
        raise InputError(
            f"the target's {what} is offloaded; give it room on a device, where the head takes it "
            "from"
        )
    return embedding


def embedding_to_share(target: Target) -> nn.Parameter | nn.Module:
    """The target's embedding as a head may hold it too: its weight, or the module of another."""
    embedding = target.model.get_input_embeddings()
    return embedding.weight if is_plain(embedding) else embedding


def output_weight(target: Target) -> Tensor:
    """[V, H] a copy of the target's output embedding, in float32.

    Raises InputError if it is offloaded.
    """
    on_a_device(target.model.get_output_embeddings(), "output embedding")
    return target.output_rows(torch.arange(target.vocab_size)).weight.float().clone()


def with_embedding(head: F, target: Target) -> F:
    """The head, with the target's embedding."""
    assert head.embed_tokens is not None
    head.embed_tokens.weight = embedding_of(target)
    return head


def new_eagle(target: Target, bias: bool = True) -> EagleHead:
    """With the target's embedding. bias: of fc."""
    sizes = (target.feature_width, target.vocab_size, target.embed_scale)
    config = eagle.config_for(target.config, *sizes) | {"bias": bias}
    return with_embedding(EagleHead(config), target)


def new_eagle3(target: Target, parts: Config | None = None) -> Eagle3Head:
    """With the target's embedding; it drafts all tokens.

    parts: fields of its config.json, for a head that is not EAGLE-3 as published (`Eagle3Head`).

    Its output layer starts as a copy of the target's if their widths agree. Raises InputError if
    the embedding or the output embedding is offloaded, or the latter is no plain linear layer.
    """
    head = with_embedding(Eagle3Head(eagle3_config(target) | (parts or {})), target)
    output = target.output_rows(torch.arange(target.vocab_size))
    if output.in_features == head.hidden_size:
        head.lm_head.weight = nn.Parameter(output.weight.float())
    return head


def eagle3_config(target: Target) -> Config:
    """The config.json of a head of EAGLE-3's layers."""
    width, taps = embedding_of(target).shape[1], eagle3.default_taps(target.layers)
    return eagle3.config_for(target.config, width, target.vocab_size, taps, target.embed_scale)


def new_medusa(target: Target, heads: int = 5) -> MedusaHead:
    """They start with a copy of the target's output embedding."""
    sizes = {"hidden_size": target.feature_width, "vocab_size": target.vocab_size}
    counts = {"medusa_num_heads": heads, "medusa_num_layers": 1}
    head = MedusaHead({"model_type": "medusa"} | counts | sizes)
    for layer in head.output_layers:
        layer.weight = nn.Parameter(output_weight(target))
    return head


def new_hydra(target: Target, heads: int = 4, kind: str = "hydra") -> HydraHead:
    """With the target's output embedding. As published, Hydra has one block and Hydra++ four."""
    llama = eagle.config_for(target.config, target.feature_width, target.vocab_size)
    config = {name: value for name, value in llama.items() if name not in ("architectures", "bias")}
    config |= {"hydra_num_heads": heads, "hydra_num_layers": 1 if kind == "hydra" else 4}
    head = HydraHead(config | {"hydra_head_arch": ARCHITECTURES[kind], "grounded_heads": True})
    for layer in head.output_layers:
        layer.weight = nn.Parameter(output_weight(target))
        nn.init.zeros_(layer.bias)
    return head


def new_hydra_plus(target: Target, heads: int = 4) -> HydraHead:
    """`new_hydra` for Hydra++."""
    return new_hydra(target, heads, "hydra++")


def new_dflash(target: Target, block_size: int = 8, layers: int = 1) -> DFlashHead:
    """Without an embedding or output of its own."""
    config = eagle.config_for(target.config, target.feature_width, target.vocab_size) | {
        "model_type": "dflash",
        "num_hidden_layers": layers,
        "taps": list(eagle3.default_taps(target.layers)),
        "block_size": block_size,
        "mask_token_id": target.vocab_size - 1,
        "target_hidden_size": target.config.hidden_size,
    }
    head = DFlashHead(config)
    head.embed_tokens = None
    return head


def new_p_eagle(target: Target, levels: int = 8) -> PEagleHead:
    """With the target's embedding."""
    own = {"model_type": "p-eagle", "levels": levels, "mask_token_id": target.vocab_size - 1}
    head = PEagleHead(eagle3_config(target) | own)
    with_embedding(head.eagle3, target)
    return head


@dataclass(frozen=True)
class Kind(Generic[H]):
    """new: (target, …) -> an untrained head in float32; some kinds take a further option.

    proposer: (head, target) -> the proposer that drafts trees with the head.
    """

    new: Callable[..., H]
    proposer: Callable[[H, Target], PairProposer]

    @torch.no_grad()
    def rollout(
        self, head: H, target: Target, tokens: Tensor, features: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """For draft step 1, 2, … the [R, V] draft logits from each of R = T - steps - 1 positions.

        tokens: [T] int64. features: [T, F] the target's. steps: at most the head's `max_depth`. Row
        t of step d drafts token t + d + 1. Five tokens, two steps:

            token      a    b    c    d    e
            step 1     c    d                  drafted from a and from b, given b and c
            step 2     d    e                  drafted on, given c and d

        A sequence of fewer than steps + 2 tokens yields nothing.
        """
        if len(tokens) - steps - 1 > 0:
            for logits in self.proposer(head, target).steps(tokens, features, steps):
                yield whole(logits, head, target)


KINDS: dict[str, Kind[Any]] = {  # by the head's own `kind`
    "eagle": Kind(new_eagle, EagleProposer),
    "eagle3": Kind(new_eagle3, EagleProposer),
    "medusa": Kind(new_medusa, MedusaProposer),
    "hydra": Kind(new_hydra, HydraProposer),
    "hydra++": Kind(new_hydra_plus, HydraProposer),
    "dflash": Kind(new_dflash, BlockProposer),
    "p-eagle": Kind(new_p_eagle, BlockProposer),
    **{row.name: resolve_name(row.family) for row in DRAFTERS.values() if row.family},
}


def draft_steps(head: Head, steps: int) -> int:
    """`steps`, or the head's `max_depth` where that is less."""
    return min(steps, head.max_depth or steps)
