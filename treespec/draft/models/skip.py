"""The target drafts for itself without some sublayers.

Draft & Verify (Zhang et al. 2024, 2309.08168). It needs no training and no further weights. If a
layer keeps its attention, drafts see the keys and values that the whole target has written for the
text. A skipped sublayer adds nothing to the residual stream:

    all sublayers           x -> x + attention(norm(x)) -> x + mlp(norm(x))
    attention skipped       x -> x                      -> x + mlp(norm(x))
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.drafter import Frontier, Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import Branch
from treespec.draft.models.skip_set import SkipSet, load_skip_set
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.output import captured
from treespec.model.target import Target


@final
class NoAttention(nn.Module):
    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


@final
class NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


@contextmanager
def skipping(target: Target, skipped: SkipSet) -> Iterator[None]:
    """Inside, the target's forwards skip these sublayers."""
    layers = target.stack
    swaps: list[tuple[nn.Module, str, nn.Module]] = []
    swaps += [(layers[k], "self_attn", NoAttention()) for k in skipped.attention]
    swaps += [(layers[k], "mlp", NoMLP()) for k in skipped.mlp]
    before = [(layer, name, getattr(layer, name)) for layer, name, _ in swaps]
    try:
        put(swaps)
        yield
    finally:
        try:
            put(before)
        finally:  # repeated, because an interrupt may hit the first
            put(before)


def put(parts: Sequence[tuple[nn.Module, str, nn.Module]]) -> None:
    """Set sublayers: (layer, attribute, sublayer) each."""
    for layer, name, part in parts:
        setattr(layer, name, part)


@torch.no_grad()
def refuse_what_cannot_skip(target: Target) -> None:
    """Raise InputError unless layers only add self_attn and mlp to the residual stream.

    A forward that skips all of them must leave the stream as it is.
    """
    # 1. The layers have both sublayers.
    name, layers = type(target.model).__name__, target.stack
    if target.recurrent:
        raise InputError(
            f"{name} cannot draft with layers skipped: some of its layers carry a state from token "
            "to token"
        )
    if not all(hasattr(layer, part) for layer in layers for part in ("self_attn", "mlp")):
        raise InputError(
            f"{name} cannot draft with layers skipped: its layers have no self_attn and mlp"
        )

    # 2. A forward without them.
    everything = SkipSet(target.layers, tuple(range(target.layers)), tuple(range(target.layers)))
    ends = (0, target.layers - 1)
    try:
        with skipping(target, everything), captured(layers, ends) as inputs:
            target.decoder(
                input_ids=torch.zeros(1, 3, dtype=torch.int64, device=target.device),
                use_cache=False,
            )
        stays = torch.equal(inputs[0], inputs[ends[1]].to(inputs[0].device))
    except (TypeError, ValueError):  # the layer expects other outputs of a sublayer
        stays = False
    if not stays:
        raise InputError(
            f"{name} cannot draft with layers skipped: its layers do more than add attention and "
            "MLP"
        )


@final
class SkipProposer(Proposer):
    """Drafts with the target without some sublayers; one text at first.

    target: accepted by `refuse_what_cannot_skip`.
    """

    branch: Branch

    def __init__(self, target: Target, skipped: SkipSet) -> None:
        self.target, self.skipped, self.vocab_size = target, skipped, target.vocab_size

    @property
    def identity(self) -> object:
        return [self.skipped.attention, self.skipped.mlp]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self.branch = Branch(self.target, cache, cache.lengths)
        with skipping(self.target, self.skipped):
            return list(self.branch.roots(roots))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        with skipping(self.target, self.skipped):
            return self.branch.extend(frontiers)


def load_skip(spec: DrafterSpec, target: Target) -> SkipProposer:
    """`--drafter self:FILE`. Raises InputError."""
    refuse_what_cannot_skip(target)
    return SkipProposer(target, load_skip_set(spec.place, target.layers))
