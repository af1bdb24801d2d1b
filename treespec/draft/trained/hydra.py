"""Hydra's heads as a proposer: a node's logits depend on the state and on the tokens of its path."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.proposer import Frontier, Proposer
from treespec.draft.trained.medusa import output_weight
from treespec.draft.trained.states import LastStates, PrefixStates, stacked
from treespec.draft.vocabulary import spread
from treespec.heads.eagle import config_for
from treespec.heads.hydra import ARCHITECTURES, HydraHead
from treespec.model.masks import rows_of, together, unpadded
from treespec.target import Target


def new_hydra(target: Target, heads: int = 4, kind: str = "hydra") -> HydraHead:
    """Untrained heads for a target, in float32, with its output embedding.

    Published: one block, four for Hydra++.
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
class HydraProposer(Proposer):
    """Drafts with heads and the target's embeddings; one text at first."""

    head: HydraHead
    per_text = ("observed",)

    def __init__(self, head: HydraHead, target: Target) -> None:
        self.head, self.target, self.vocab_size = head, target, target.vocab_size
        plus = head.kind == "hydra++"
        self.observed: PrefixStates | LastStates = (
            PrefixStates(head, target.output_device) if plus else LastStates()
        )
        self.inputs = torch.empty(
            0
        )  # [B, F, (level + 2) H] state and embeddings along the path to each frontier node
        self.level = 0

    @property
    def lengths(self) -> list[int]:
        return self.observed.lengths

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        known = self.observed.known()
        if all(state is None for state in known):
            return [None] * len(known)
        states, self.level = stacked(known), 0
        self.inputs = torch.cat([states, self._embedded(roots, states)], dim=-1)[:, None]
        logits = self.head.step(0, self.inputs)  # [B, 1, N]
        return [None if state is None else row for row, state in zip(logits, known, strict=True)]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        nothing = torch.empty(0, dtype=torch.int64, device=self.inputs.device)
        tokens = together([f.tokens if f else nothing for f in frontiers])  # [B, F]
        above = together([f.parent_rows if f else nothing for f in frontiers])
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        self.inputs = torch.cat(
            [rows_of(self.inputs, above), self._embedded(tokens, self.inputs)], dim=-1
        )
        self.level += 1
        sizes = [len(f.tokens) if f else 0 for f in frontiers]
        logits = self.head.step(self.level, unpadded(self.inputs, sizes))
        return list(logits.split(sizes))

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.target.embeddings(tokens).to(like.dtype)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.observed.observe(features)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.observed.rewind(lengths)

    def new(self) -> "HydraProposer":
        return HydraProposer(self.head, self.target)


@torch.no_grad()
def hydra_rollout(
    head: HydraHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """`Kind.rollout`: step d is head d - 1, given the text's own tokens."""
    rows = len(tokens) - steps - 1
    if rows <= 0:
        return
    inputs = head.states(
        features[None, :rows].to(head.dtype), torch.arange(rows, device=features.device)
    )[0]
    embedded = target.embeddings(tokens).to(head.dtype)
    for i in range(steps):
        inputs = torch.cat([inputs, embedded[i + 1 : i + 1 + rows]], dim=-1)
        logits = head.step(i, inputs)
        yield (
            logits
            if head.vocabulary is None
            else spread(logits, head.vocabulary, target.vocab_size, -torch.inf)
        )
