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

from treespec.draft.drafter import Frontiers
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import BranchProposer
from treespec.draft.models.skip_set import SkipSet, load_skip_set
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.output import captured
from treespec.model.target import Target


@final
class Nothing(nn.Module):
    """A sublayer that adds nothing. attends: it gives no attention weights either."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.attends else nothing


@contextmanager
def skipping(target: Target, skipped: SkipSet) -> Iterator[None]:
    """Inside, the target's forwards skip these sublayers."""
    names = [(k, "self_attn") for k in skipped.attention] + [(k, "mlp") for k in skipped.mlp]
    places = [(target.stack[k], name) for k, name in names]
    before = [getattr(layer, name) for layer, name in places]

    def put(parts: Sequence[nn.Module]) -> None:
        for (layer, name), part in zip(places, parts, strict=True):
            setattr(layer, name, part)

    try:
        put([Nothing(name == "self_attn") for _, name in places])
        yield
    finally:
        try:
            put(before)
        finally:  # repeated, because an interrupt may hit the first
            put(before)


@torch.no_grad()
def refuse_what_cannot_skip(target: Target) -> None:
    """Raise InputError unless layers only add self_attn and mlp to the residual stream.

    A forward that skips all of them must leave the stream as it is.
    """
    name, layers, every = type(target.model).__name__, target.stack, tuple(range(target.layers))
    reason = "some of its layers carry a state from token to token" if target.recurrent else ""
    if not all(hasattr(layer, part) for layer in layers for part in ("self_attn", "mlp")):
        reason = reason or "its layers have no self_attn and mlp"
    if not reason:
        ids = torch.zeros(1, 3, dtype=torch.int64, device=target.device)
        try:
            with (
                skipping(target, SkipSet(target.layers, every, every)),
                captured(layers, (every[0], every[-1])) as inputs,
            ):
                target.decoder(input_ids=ids, use_cache=False)
            stays = torch.equal(inputs[0], inputs[every[-1]].to(inputs[0].device))
        except (TypeError, ValueError):  # the layer expects other outputs of a sublayer
            stays = False
        reason = "" if stays else "its layers do more than add attention and MLP"
    if reason:
        raise InputError(f"{name} cannot draft with layers skipped: {reason}")


@final
class SkipProposer(BranchProposer):
    """Drafts with the target without some sublayers; one sequence at first.

    target: accepted by `refuse_what_cannot_skip`.
    """

    def __init__(self, target: Target, skipped: SkipSet) -> None:
        self.model, self.skipped, self.vocab_size = target, skipped, target.vocab_size

    @property
    def identity(self) -> object:
        return [self.skipped.attention, self.skipped.mlp]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self.follow(cache)
        return self.below(roots)

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        with skipping(self.model, self.skipped):
            return super().extend(frontiers)


def load_skip(spec: DrafterSpec, target: Target) -> SkipProposer:
    """`--drafter self:FILE`. Raises InputError."""
    refuse_what_cannot_skip(target)
    return SkipProposer(target, load_skip_set(spec.place, target.layers))
