"""A sequence whose prompt is being prefilled, and how many tokens that takes at once."""

from dataclasses import dataclass
from typing import final

from treespec.draft.drafter import Drafter
from treespec.engine.request import Request
from treespec.model.cache import TreeCache
from treespec.model.pictures import PictureInputs

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
