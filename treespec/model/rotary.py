"""Rotary factors of two kinds, for short and for long texts: `longrope`, of Phi-3.

Such a model rotates keys and queries by one set of factors in texts of up to
`original_max_position_embeddings` tokens, and by another in longer ones. Its code chooses by the largest
position of a forward. Here each text of a forward has its own choice, and a text whose length crosses the
limit gets all its keys again. That is what the model computes over the whole text, and what transformers'
`generate` does. With a limit of 4 tokens:

    text          factors of all its keys
    a b c d       short
    a b c d e     long: the keys of a b c d are computed again before e is forwarded
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from treespec.model.cache import TreeCache
from treespec.model.recurrent.rows import replaced
from treespec.trees.tree import sent

Factors = tuple[Tensor, ...]  # cos and sin, [B, N, D] each
TRIAL_POSITIONS = 4


def longest_short_text(config: PreTrainedConfig) -> int | None:
    """The tokens of the longest text with short factors; None where all texts have the same ones."""
    promised: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *parameters.values()]:
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind == "longrope":
            name = "original_max_position_embeddings"
            original: int = rope.get(name) or getattr(config, name, None) or promised
            return original if original < promised else None
    return None


@final
class LengthFactors:
    """The rotary modules of a decoder, each text's factors by its own length.

    limit: tokens of the longest text with short factors.
    """

    def __init__(self, decoder: nn.Module, limit: int) -> None:
        self.limit = limit
        self.modules = [
            module
            for module in decoder.modules()
            if any(name.endswith("inv_freq") for name in vars(module)["_buffers"])
        ]

    @contextmanager
    def by_text(self, is_long: Tensor) -> Iterator[None]:
        """Inside, a forward rotates each text by its own factors.

        is_long: [B, N] bool, the same for all N nodes of a text.
        """
        with replaced({m: partial(self._both, m.forward, is_long[:, :1]) for m in self.modules}):
            yield

    def _both(
        self, code: Any, is_long: Tensor, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Factors:
        """The output of a rotary module for positions [B, N]. code: its own forward.

        No node of a short text beyond the limit is kept, so those positions do not count. A further
        position, beyond the limit, makes the factors long.
        """
        beyond = torch.full_like(position_ids[:, :1], self.limit)
        short = code(x, position_ids.clamp_max(self.limit - 1), *args, **kwargs)
        long = code(x, torch.cat([position_ids, beyond], 1), *args, **kwargs)
        chosen = is_long[..., None]
        return tuple(torch.where(chosen, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    def is_understood(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the modules give each kind of factors as in a text of that length, by a trial."""
        x = torch.zeros(1, 1, 1, dtype=dtype, device=device)
        places = torch.arange(self.limit + 1, device=device)[None]
        first = places[:, :TRIAL_POSITIONS]
        for module in self.modules:
            for is_long, length in ((False, self.limit), (True, self.limit + 1)):
                chosen = torch.full((1, 1), is_long, device=device)
                try:
                    whole = module.forward(x, places[:, :length])
                    found = self._both(module.forward, chosen, x, first)
                except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
                    return False  # it takes other arguments
                pairs = zip(found, whole, strict=True)
                if not all(torch.equal(a, b[:, : a.shape[1]]) for a, b in pairs):
                    return False
        return bool(self.modules)

    def rows(self, cache: TreeCache, nodes: int, device: torch.device) -> Tensor:
        """[B, N] bool: whether the keys of each text in a cache have long factors."""
        return sent([[row[-1].is_long] * nodes for row in cache.rows], device)

    def outdated(self, cache: TreeCache, lengths: Sequence[int]) -> list[int]:
        """The rows of a cache whose keys have other factors than texts of these lengths.

        lengths: of each text, without the token that is forwarded next.
        """
        pairs = zip(cache.rows, lengths, strict=True)
        wrong = (row[-1].is_long != (length >= self.limit) for row, length in pairs)
        return [number for number, is_wrong in enumerate(wrong) if is_wrong]

    def deepest(self, cache: TreeCache) -> list[int]:
        """For each text, the largest depth of a node whose logits are exact."""
        far = 1 << 30
        return [self.limit - 1 - n if n < self.limit else far for n in cache.lengths]
