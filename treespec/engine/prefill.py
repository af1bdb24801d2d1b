"""A sequence whose prompt is being prefilled, the forwards of prompts, and how many tokens these take at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.nn.utils.rnn import pad_sequence

from treespec.draft.drafter import Drafter
from treespec.engine.request import Request
from treespec.model.cache import TreeCache
from treespec.model.pictures import PictureInputs
from treespec.model.target import Target

PREFILL_CHUNK_TOKENS = 1024  # prompt tokens in a forward: bounds the memory of their features


IDLE_CHUNK_TOKENS = 128  # the same if no request decodes, but another one may enter soon


GROUP_PREFILL_TOKENS = 8192  # the same if a GPU prefills several prompts in it, padding included


@final
@dataclass(eq=False)
class Prefilling:
    """A request with a cache and a drafter of its own: before it gets a row of the batch, and after it has left.

    Cache and drafter contain exactly `request.committed`, which may begin with a reused prefix.

    Attributes:
        request: The request.
        cache: A cache of one row.
        drafter: A drafter of one sequence; None if the batch has no drafter.
        begun: Whether the cache was chosen and the prompt's tokens are counted (`Batch._begin`).
        shown: The prepared inputs of a prompt with pictures; None before `begun` and for text only.
    """

    request: Request
    cache: TreeCache
    drafter: Drafter | None
    begun: bool = False
    shown: PictureInputs | None = None

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not in the cache yet, except the last one, which is the root of the first tree."""
        return len(self.request.prompt) - 1 - len(self.request.committed)

    @property
    def is_new(self) -> bool:
        """Whether the whole prompt is still to be prefilled, and no other request shares its cache."""
        request = self.request
        if request.samples or request.pictures or request.committed:
            return False
        return self.begun and self.remaining > 0


def get_aux_layers(drafter: Drafter | None) -> tuple[int, ...]:
    """The target layers whose hidden states a drafter reads; () without a drafter."""
    if drafter is None:
        return ()
    return drafter.aux_layers


def limit_tokens(max_tokens: int | None, spent_tokens: int, default: int) -> int:
    """The number of prompt tokens that may still be prefilled: `max_tokens` less those spent, or `default`."""
    if max_tokens is None:
        return default
    return max_tokens - spent_tokens


def prefill_chunk(target: Target, prefilling: Prefilling, max_tokens: int) -> int:
    """Prefill the next chunk of a prompt, of at most `max_tokens` tokens. Returns the number of its tokens."""
    request = prefilling.request
    drafter = prefilling.drafter
    start = len(request.committed)
    count = min(max_tokens, PREFILL_CHUNK_TOKENS, prefilling.remaining)
    if count:
        tokens = torch.tensor(
            request.prompt[start : start + count + 1], dtype=torch.int64, device="cpu"
        )  # and the one after it
        tokens_ahead = prefilling.remaining - count
        features = target.prefill(
            prefilling.cache,
            tokens[None, :-1],
            get_aux_layers(drafter),
            None,
            prefilling.shown,
            tokens_ahead,
        )
        if drafter:
            drafter.observe([features[0]], [tokens])
        request.committed = request.prompt[: start + count]
    if request.samples and not prefilling.remaining:
        request.samples.begin(prefilling.cache, drafter)
    return count


def prefill_group(target: Target, group: Sequence[Prefilling]) -> int:
    """Prefill new prompts in one forward. Returns the number of their tokens, padding included."""
    counts = [prefilling.remaining for prefilling in group]
    drafter = group[0].drafter
    cache = target.build_cache(max(counts))
    cache.rewind([0] * len(group))
    prompts = [
        torch.tensor(prefilling.request.prompt, dtype=torch.int64, device="cpu")
        for prefilling in group
    ]
    tokens = pad_sequence(prompts, batch_first=True)[:, :-1]  # [B, T]
    features = target.prefill(cache, tokens, get_aux_layers(drafter), counts)
    for row, prefilling in enumerate(group):
        capacity = prefilling.cache.tree_layers[0].capacity
        prefilling.cache = cache.copy_sequence(row, capacity)
        prefilling.request.committed = prefilling.request.prompt[:-1]
        if prefilling.drafter:
            prefilling.drafter.observe([features[row, : counts[row]]], [prompts[row]])
    return tokens.numel()
