"""Rotary factors of two kinds, for short and for long texts: `longrope`, of Phi-3.

Such a model rotates keys and queries by one set of factors in texts of up to
`original_max_position_embeddings` tokens, and by another in longer texts. Its code chooses by the largest
position of a forward. Here the factors are chosen for each text of a forward. When the length of a text crosses the
limit, all its keys are computed again. The model computes the same over the whole text, and so does transformers'
`generate`. With a limit of 4 tokens:

    text          factors of all its keys
    a b c d       short
    a b c d e     long: the keys of a b c d are computed again before e is forwarded

A node of a tree is rotated by its position, length + depth, so siblings share their factors. Five nodes after
three tokens of a short text, under a limit of 5:

    0 ─┬─ 1 ─── 3        node          0  1  2  3  4
       └─ 2 ─── 4        position      3  4  4  5  5
                         rotated by    3  4  4  4  4      nodes 3 and 4 lie beyond: `find_deepest` gives depth 1
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
from treespec.model.support import get_promised_length, get_rotary_type, list_rotary_settings
from treespec.trees.tree import to_device

Factors = tuple[Tensor, ...]  # cos and sin, [B, N, D] each
TRIAL_POSITIONS = 4


def find_longest_short_text(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens of the longest text with short factors; None if all texts have the same factors."""
    promised = get_promised_length(config)
    for rope in list_rotary_settings(config):
        if get_rotary_type(rope) == "longrope":
            name = "original_max_position_embeddings"
            original: int = rope.get(name) or getattr(config, name, None) or promised
            if original < promised:
                return original
            return None
    return None


@final
class LengthFactors:
    """The rotary modules of a decoder, with factors by the length of each text.

    limit: number of tokens of the longest text with short factors.
    """

    def __init__(self, decoder: nn.Module, limit: int) -> None:
        self.limit = limit
        self.modules = [module for module in decoder.modules() if has_rotary_frequencies(module)]

    @contextmanager
    def by_text(self, is_long: Tensor) -> Iterator[None]:
        """Inside, a forward rotates each text by the factors of its kind.

        is_long: [B, N] bool, the same for all N nodes of a text.
        """
        is_long_text = is_long[:, :1]
        forwards = {}
        for module in self.modules:
            forwards[module] = partial(self._compute_both, module.forward, is_long_text)
        with replaced(forwards):
            yield

    def _compute_both(
        self,
        forward: Any,
        is_long: Tensor,
        x: Tensor,
        position_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Factors:
        """Compute a rotary module's output for positions [B, N].

        A short text keeps no node beyond the limit, so its positions are clamped. One more
        position, beyond the limit, makes the module compute long factors.

        Args:
            forward: the module's unchanged forward.
            is_long: [B, 1] bool.
            x: as the module takes it; only its dtype and device count.
            position_ids: [B, N].
        """
        beyond = torch.full_like(position_ids[:, :1], self.limit)
        short = forward(x, position_ids.clamp_max(self.limit - 1), *args, **kwargs)
        long = forward(x, torch.cat([position_ids, beyond], 1), *args, **kwargs)
        is_long_factor = is_long[..., None]
        factors = []
        for of_short, of_long in zip(short, long, strict=True):
            factors.append(torch.where(is_long_factor, of_long[:, :-1], of_short))
        return tuple(factors)

    def is_understood(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the replaced forwards give the modules' factors for a short and for a long text, by a trial."""
        x = torch.zeros(1, 1, 1, dtype=dtype, device=device)
        places = torch.arange(self.limit + 1, device=device)[None]
        for module in self.modules:
            if not self._is_equal(module, x, places[:, : self.limit], is_long=False):
                return False
            if not self._is_equal(module, x, places, is_long=True):
                return False
        return bool(self.modules)

    def _is_equal(self, module: nn.Module, x: Tensor, places: Tensor, is_long: bool) -> bool:
        """Whether the first factors of a text equal those of the module's forward over the whole text.

        Args:
            module: a rotary module.
            x: [1, 1, 1] zeros of the hidden states' dtype.
            places: [1, T] positions of the text.
            is_long: whether the text has long factors.
        """
        chosen = torch.full((1, 1), is_long, dtype=torch.bool, device=places.device)
        try:
            expected = module.forward(x, places)
            first = self._compute_both(module.forward, chosen, x, places[:, :TRIAL_POSITIONS])
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
            return False  # it takes other arguments
        pairs = zip(first, expected, strict=True)
        return all(torch.equal(part, factors[:, : part.shape[1]]) for part, factors in pairs)

    def select_rows(self, cache: TreeCache, nodes: int, device: torch.device) -> Tensor:
        """Return [B, N] bool: whether the keys of each text in a cache have long factors."""
        return to_device([[row.now.is_long] * nodes for row in cache.rows], device)

    def find_outdated(self, cache: TreeCache, lengths: Sequence[int]) -> list[int]:
        """List the rows of a cache whose keys have other factors than texts of these lengths.

        lengths: by text, without the token that is forwarded next.
        """
        outdated = []
        for number, (row, length) in enumerate(zip(cache.rows, lengths, strict=True)):
            is_long = length >= self.limit
            if row.now.is_long != is_long:
                outdated.append(number)
        return outdated

    def find_deepest(self, cache: TreeCache) -> list[int]:
        """Return, by text, the largest depth of a node whose logits are exact."""
        depths = []
        for length in cache.lengths:
            if length < self.limit:
                depths.append(self.limit - 1 - length)
            else:
                depths.append(1 << 30)
        return depths


def has_rotary_frequencies(module: nn.Module) -> bool:
    """Whether a module holds the frequencies of rotary positions."""
    return any(name.endswith("inv_freq") for name in vars(module)["_buffers"])
