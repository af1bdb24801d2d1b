"""Hydra's heads as a proposer: logits depend on the state and the tokens of a node's path."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.proposer import Frontier, aligned
from treespec.draft.trained.medusa import output_weight
from treespec.draft.trained.states import LastStates, PrefixStates, StateProposer
from treespec.draft.vocabulary import whole
from treespec.heads.eagle import config_for
from treespec.heads.hydra import ARCHITECTURES, HydraHead
from treespec.model.masks import rows_of, unpadded
from treespec.model.target import Target


def new_hydra(target: Target, heads: int = 4, kind: str = "hydra") -> HydraHead:
    """Untrained heads for a target, in float32, with its output embedding.

    As published, Hydra has one block and Hydra++ four.
    """
    llama = config_for(target.config, target.feature_width, target.vocab_size)
    config = {name: value for name, value in llama.items() if name not in ("architectures", "bias")}
    config |= {"hydra_num_heads": heads, "hydra_num_layers": 1 if kind == "hydra" else 4}
    head = HydraHead(config | {"hydra_head_arch": ARCHITECTURES[kind], "grounded_heads": True})
    for layer in head.output_layers:
        layer.weight = torch.nn.Parameter(output_weight(target))
        torch.nn.init.zeros_(layer.bias)
    return head


def new_hydra_plus(target: Target, heads: int = 4) -> HydraHead:
    """`new_hydra` for Hydra++."""
    return new_hydra(target, heads, "hydra++")


@final
class HydraProposer(StateProposer):
    """Drafts with heads and the target's embeddings; one text at first."""

    head: HydraHead

    def __init__(self, head: HydraHead, target: Target) -> None:
        self.head, self.target, self.vocab_size = head, target, target.vocab_size
        plus = head.kind == "hydra++"
        self.observed: PrefixStates | LastStates = (
            PrefixStates(head, target.output_device) if plus else LastStates()
        )
        # [B, F, (level + 2) H] the state, and the embeddings along the path to each frontier node.
        self.inputs = torch.empty(0)
        self.level = 0

    def start(self, states: Tensor, roots: Tensor) -> Tensor:
        self.level = 0
        self.inputs = torch.cat([states, self._embedded(roots, states)], dim=-1)[:, None]
        return self.head.step(0, self.inputs)

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = aligned(frontiers, self.inputs.device)
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        embedded = self._embedded(tokens, self.inputs)
        self.inputs = torch.cat([rows_of(self.inputs, above), embedded], dim=-1)
        self.level += 1
        logits = self.head.step(self.level, unpadded(self.inputs, sizes))
        return list(logits.split(sizes))

    def new(self) -> "HydraProposer":
        return HydraProposer(self.head, self.target)

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.target.embeddings(tokens).to(like.dtype)


@torch.no_grad()
def hydra_rollout(
    head: HydraHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """`Kind.rollout`: step d is head d - 1, given the text's own tokens."""
    rows = len(tokens) - steps - 1
    if rows <= 0:
        return
    positions = torch.arange(rows, device=features.device)
    inputs = head.states(features[None, :rows].to(head.dtype), positions)[0]
    embedded = target.embeddings(tokens).to(head.dtype)
    for i in range(steps):
        inputs = torch.cat([inputs, embedded[i + 1 : i + 1 + rows]], dim=-1)
        logits = head.step(i, inputs)
        yield whole(logits, head, target)
