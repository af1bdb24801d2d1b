"""Trained heads of any kind: new ones for a target, and what drafts with them."""

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from treespec.draft.trained.pairs import PairProposer
from treespec.draft.vocabulary import whole
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.heads.registry import HEADS
from treespec.model.quantised import is_plain, table_of
from treespec.model.target import Target


def embedding_of(target: Target) -> nn.Parameter:
    """[V, E] the target's embedding. Raises InputError if it is offloaded or quantised."""
    return table_of(on_a_device(target.model.get_input_embeddings(), "embedding"))


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


def new_head(kind: str, target: Target, **fields: Any) -> Any:
    """An untrained head in float32, with the target's embedding if it needs one.

    Its output layers begin as copies of the target's. fields: of its config.json; `heads`: the
    number of Medusa's or Hydra's. Raises InputError if the embedding or the output embedding is
    offloaded, or the latter is no plain linear layer.
    """
    build = HEADS[kind].build()
    head: Head = build(build.config_for(target, **fields))
    head.embed_tokens = None
    if head.lacks_embedding:
        head.share_embedding(embedding_of(target))
    for layer in head.output_layers:
        on_a_device(target.model.get_output_embeddings(), "output embedding")
        rows = target.output_rows(torch.arange(target.vocab_size))
        layer.weight = nn.Parameter(rows.weight.float().clone())
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return head


def proposer_of(head: Head, target: Target) -> PairProposer:
    """The proposer that drafts trees with a head."""
    proposer: PairProposer = resolve_name(HEADS[head.kind].proposer)(head, target)
    return proposer


@torch.no_grad()
def rollout(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
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
        for logits in proposer_of(head, target).steps(tokens, features, steps):
            yield whole(logits, head, target)


def draft_steps(head: Head, steps: int) -> int:
    """`steps`, or the head's `max_depth` where that is less."""
    return min(steps, head.max_depth or steps)
