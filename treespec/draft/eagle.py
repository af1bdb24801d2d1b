"""The EAGLE-1/2 head as a proposer: true features of accepted tokens go in, drafted ones are forgotten."""

import time
from typing import final

import torch
from torch import Tensor

from treespec.cache import TreeLayer
from treespec.errors import InputError
from treespec.heads.eagle import EagleHead, config_for
from treespec.target import Target


def new_head(target: Target) -> EagleHead:
    """An untrained head for a target, in float32, with the target's embedding."""
    head = EagleHead(config_for(target.config, target.feature_width, target.vocab_size, target.embed_scale))
    weight = target.model.get_input_embeddings().weight
    if weight.is_meta:
        raise InputError("the target's embedding is offloaded; give it room on a device to train a head")
    head.embed_tokens.weight = weight
    return head


@final
class EagleProposer:
    """Drafts with a head and the target's output path; holds one text.

    Observed pairs (feature, following token) wait until `begin` runs the head over them. Every level of a
    tree is written behind them in the head's own cache, and forgotten by the next `begin`:

        | observed pairs | level 1 | level 2 | ...
    """

    taps: tuple[int, ...] = ()

    def __init__(self, head: EagleHead, target: Target, chunk: int = 512) -> None:
        self.head, self.target, self.chunk = head, target, chunk
        self.forward_seconds = 0.0
        self.layer = TreeLayer(capacity=512)
        self.done = 0  # pairs in the head's cache
        self.waiting_features, self.waiting_tokens = self._nothing()
        self.level = 0
        self.frontier = torch.empty(0)  # [F, H] features extrapolated at the frontier
        self.seen = torch.empty(0)  # [F, T] bool: which of the T drafted pairs each frontier node sees

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def vocabulary(self) -> Tensor | None:
        return self.head.vocabulary

    @property
    def length(self) -> int:
        return self.done + len(self.waiting_tokens)

    def observe(self, features: Tensor, following: Tensor) -> None:
        following = following.to(features.device)
        if len(self.waiting_tokens):
            features = torch.cat([self.waiting_features, features])
            following = torch.cat([self.waiting_tokens, following])
        self.waiting_features, self.waiting_tokens = features, following

    def rewind(self, length: int) -> None:
        keep = max(0, length - self.done)
        self.waiting_features, self.waiting_tokens = self.waiting_features[:keep], self.waiting_tokens[:keep]
        self.done = min(self.done, length)

    @torch.no_grad()
    def begin(self) -> Tensor | None:
        if not len(self.waiting_tokens):
            return None
        started = time.perf_counter()
        self.layer.length = self.done
        pairs = zip(self.waiting_tokens.split(self.chunk), self.waiting_features.split(self.chunk), strict=True)
        for tokens, features in pairs:
            n, past = len(tokens), self.layer.length
            mask = torch.ones(n, past + n, dtype=torch.bool, device=tokens.device).tril(past)
            positions = torch.arange(past, past + n, device=tokens.device)
            hidden = self._forward(tokens, features, positions, mask)
        self.done = self.layer.length
        self.waiting_features, self.waiting_tokens = self._nothing()
        self.level = 0
        self.frontier = hidden[-1:]
        self.seen = torch.ones(1, 0, dtype=torch.bool, device=hidden.device)
        logits = self.target.output_logits(self.frontier, self.head.output)
        self.forward_seconds += time.perf_counter() - started
        return logits

    @torch.no_grad()
    def extend(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        started = time.perf_counter()
        own = torch.eye(len(tokens), dtype=torch.bool, device=tokens.device)
        self.seen = torch.cat([self.seen[parent_rows], own], dim=1)
        mask = torch.cat([self.seen.new_ones(len(tokens), self.done), self.seen], dim=1)
        positions = torch.full((1,), self.done + self.level, device=tokens.device)
        self.level += 1
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        self.frontier = self._forward(tokens, self.frontier[parent_rows], positions, mask)
        logits = self.target.output_logits(self.frontier, self.head.output)
        self.forward_seconds += time.perf_counter() - started
        return logits

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        hidden = self.head(tokens[None], features[None], positions, mask, self.layer)[0]
        self.layer.length += len(tokens)
        return hidden

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """No features [0, H] and no tokens [0]."""
        device = self.target.output_device
        features = torch.empty(0, self.head.hidden_size, dtype=self.head.dtype, device=device)
        return features, torch.empty(0, dtype=torch.int64, device=device)
