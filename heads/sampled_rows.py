"""The rows from which a block head drafts in training, where these are a sample of a text's rows.

A row is the place of a pair, a feature and the token after it (`Head.forward`). A level is drafted from the first
rows of a random order, so later levels have nested samples. Six rows; four draft level 1, three level 2, two level 3:

    order      4 1 5 2 | 0 3
    level 1    x x x x
    level 2    x x x
    level 3    x x
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SampledRows(NamedTuple):
    """The sampled rows of B texts, whose longest has R rows.

    Attributes:
        order: [B, R] int64 the rows of each text in its random order; rows that a text lacks come last.
        sizes: [D, B] int64 for each level the number of rows that draft it, at the front of the order.
        widths: for each level the largest of its sizes, at least 1: all texts compute that many rows.
    """

    order: Tensor
    sizes: Tensor
    widths: tuple[int, ...]

    @classmethod
    def from_sizes(cls, order: Tensor, sizes: Tensor) -> "SampledRows":
        """Build it from an order and sizes on the CPU."""
        widths = tuple(sizes.amax(1).clamp(min=1).tolist())
        return cls(order, sizes, widths)

    @classmethod
    def from_range(cls, first: int, end: int, rows: int, levels: int) -> "SampledRows":
        """Build it for one text of `rows` rows: those from `first` to before `end` draft all levels."""
        order = torch.arange(rows, device="cpu").roll(-first)
        sizes = torch.full((levels, 1), end - first, dtype=torch.int64, device="cpu")
        return cls.from_sizes(order[None], sizes)

    @classmethod
    def stack(cls, samples: Sequence["SampledRows"]) -> "SampledRows":
        """Stack the samples of single texts, on the CPU, to one of a batch."""
        lengths = [sample.order.shape[1] for sample in samples]
        orders = []
        sizes = []
        for sample, length in zip(samples, lengths, strict=True):
            missing = torch.arange(length, max(lengths), device=sample.order.device)
            orders.append(torch.cat([sample.order, missing[None]], dim=1))
            sizes.append(sample.sizes)
        return cls.from_sizes(torch.cat(orders), torch.cat(sizes, dim=1))

    def to_device(self, device: torch.device) -> "SampledRows":
        """Copy it to a device."""
        return self._replace(order=self.order.to(device), sizes=self.sizes.to(device))

    def list_rows(self, level: int) -> Tensor:
        """List the rows [B, A] that are computed for a level, from 0. A text with fewer rows computes further ones."""
        return self.order[:, : self.widths[level]]

    def gather_tokens(self, tokens: Tensor, level: int) -> Tensor:
        """Gather the token above each row's draft of a level: tokens [B, T] -> [B, A]; any token beyond the text."""
        places = self.list_rows(level) + level + 1
        return tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))

    def mark_reached(self, counts: Tensor, level: int) -> Tensor:
        """Mark the wanted drafts that a level makes: [B, R] bool of their places, where counts [B, R] are wanted."""
        sampled = torch.zeros_like(counts).scatter(
            1, self.list_rows(level), self._mark_sampled(level)
        )
        rows = counts.shape[1] - level
        return F.pad(sampled[:, :rows], (level, 0)) & counts

    def mark_levels(self, counts: Tensor, levels: int) -> Tensor:
        """Mark the wanted drafts of the first levels, as `mark_reached`: [levels, B, R] bool."""
        marks = counts.new_zeros(levels, counts.shape[0], counts.shape[1])
        for level in range(levels):
            marks[level] = self.mark_reached(counts, level)
        return marks

    def select_wanted(self, states: Tensor, counts: Tensor, level: int) -> Tensor:
        """Select a level's wanted states [M, H] out of [B, A, H], in the order of their places in the texts."""
        rows = self.list_rows(level)
        wanted = self._mark_sampled(level) & F.pad(counts, (0, level)).gather(1, rows + level)
        firsts = torch.arange(len(rows), device=rows.device)[:, None] * counts.shape[1]
        places = (rows + firsts)[wanted]
        return states[wanted][places.argsort()]

    def _mark_sampled(self, level: int) -> Tensor:
        """Mark the computed rows that are sampled: [B, A] bool."""
        numbers = torch.arange(self.widths[level], device=self.order.device)
        return numbers < self.sizes[level][:, None]
