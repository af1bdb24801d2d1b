"""The target drafts for itself without some of its sublayers (`--drafter self`).

Draft & Verify, Zhang et al. 2024 (2309.08168). It needs no training and no further weights. A skipped sublayer adds
nothing to the residual stream:

    all sublayers           x -> x + attention(norm(x)) -> x + mlp(norm(x))
    attention skipped       x -> x                      -> x + mlp(norm(x))

Attention that is kept reads the keys and values that the whole target has written for the sequence. Drafted columns lie
after the sequences, and are dropped.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self, final

import torch
from torch import Tensor, nn

from treespec.draft.drafter import Frontiers
from treespec.draft.models.branch import BranchProposer
from treespec.draft.models.skip_set import SkipSet, load_skip_set, spread_skipped_layers
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.cuda_graphs import build_graphs
from treespec.model.output import captured
from treespec.model.target import Target


@final
class SkippedSublayer(nn.Module):
    """A sublayer that adds nothing. is_attention: it returns attention weights too, and has none."""

    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        nothing = torch.zeros_like(hidden_states)
        if self.is_attention:
            return nothing, None
        return nothing


@final
class Skipping:
    """Lets the forwards of a target skip sublayers.

    Attributes:
        graphs: of the forwards that skip; None: the target has no CUDA graphs.
    """

    def __init__(self, target: Target, skipped: SkipSet) -> None:
        stack = target.tree_decoder.stack
        self.decoder = target.tree_decoder
        self.places = [(stack[number], "self_attn") for number in skipped.attention]
        self.places += [(stack[number], "mlp") for number in skipped.mlp]
        self.kept = [getattr(layer, name) for layer, name in self.places]
        self.replacements = [SkippedSublayer(name == "self_attn") for _, name in self.places]
        self.graphs = build_graphs(target.model, self.decoder)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the target's forwards skip the sublayers."""
        whole_graphs = self.decoder.graphs
        try:
            self._put(self.replacements)
            self.decoder.graphs = self.graphs
            yield
        finally:
            try:
                self._put(self.kept)
            finally:  # once more, because an interrupt may hit the first
                self._put(self.kept)
                self.decoder.graphs = whole_graphs

    def _put(self, sublayers: Sequence[nn.Module]) -> None:
        for (layer, name), sublayer in zip(self.places, sublayers, strict=True):
            setattr(layer, name, sublayer)


@final
class SkipProposer(BranchProposer):
    """Drafts with a target that `refuse_other_layers` accepts. Its cache holds the sequences; this holds none."""

    def __init__(self, target: Target, skipped: SkipSet) -> None:
        self.model = target
        self.skipped = skipped
        self.vocab_size = target.vocab_size
        self.skipping = Skipping(target, skipped)

    def new(self) -> Self:
        return copy.copy(self)

    @property
    def identity(self) -> object:
        return [self.skipped.attention, self.skipped.mlp]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self.follow(cache)
        return self.extend_roots(roots)

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        with self.skipping.active():
            return super().extend(frontiers)


@torch.no_grad()
def refuse_other_layers(target: Target) -> None:
    """Raises InputError unless layers only add `self_attn` and `mlp` to the residual stream.

    A forward that skips them all must leave the stream as it is.
    """
    stack = target.tree_decoder.stack
    reason = ""
    if target.tree_decoder.recurrent:
        reason = "some of its layers carry a state from token to token"
    elif not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in stack):
        reason = "its layers have no self_attn and mlp"
    elif not has_plain_residuals(target):
        reason = "its layers do more than add attention and MLP"
    if reason:
        name = type(target.model).__name__
        raise InputError(f"{name} cannot draft with layers skipped: {reason}")


def has_plain_residuals(target: Target) -> bool:
    """Whether a forward that skips every sublayer hands the first layer's input on to the end, to the bit."""
    stack = target.tree_decoder.stack
    numbers = tuple(range(len(stack)))
    skipping = Skipping(target, SkipSet(len(stack), numbers, numbers))
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=target.device)
    try:
        with skipping.active(), captured(stack, (0, len(stack))) as inputs:
            target.tree_decoder.decoder(input_ids=tokens, use_cache=False)
    except (TypeError, ValueError):  # the layer expects other outputs of a sublayer
        return False
    last = inputs[len(stack)]
    return torch.equal(inputs[0].to(last.device), last)


def load_skip(spec: DrafterSpec, target: Target) -> SkipProposer:
    """Loads `--drafter self` or `self:FILE`. Raises InputError."""
    refuse_other_layers(target)
    layers = len(target.tree_decoder.stack)
    if spec.place:
        return SkipProposer(target, load_skip_set(spec.place, layers))
    return SkipProposer(target, spread_skipped_layers(layers, spec.options.percent))
