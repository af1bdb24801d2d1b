"""Penalties on tokens that occurred before: repetition, presence and frequency."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Penalties:
    """Makes tokens less likely that the prompt or the answer holds.

    repetition: divides the positive logits of all tokens of prompt and answer, and multiplies the
    negative ones (Keskar et al. 2019, 1909.05858); transformers and vLLM count the same. 1 is off.
    presence, frequency: subtracted from the logits of the answer's tokens, once for each token and
    once for each of its occurrences (OpenAI's API reference). 0 is off. Below 1 or 0 they make
    tokens likelier.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@final
class Counts:
    """The penalties of one text: each token that occurred has a column in small tables.

    place: the column of each token. counts: how often the answer holds it. read: tokens of the
    answer that were counted.
    """

    def __init__(self, by: Penalties, prompt: Sequence[int] = ()) -> None:
        self.by = by
        counted = dict.fromkeys(prompt) if by.repetition != 1 else {}
        self.place = {token: column for column, token in enumerate(counted)}
        self.prompted = len(self.place)  # the first columns are the prompt's
        self.counts = [0] * len(self.place)
        self.read = 0

    def begin(self, prompt: Sequence[int]) -> "Counts":
        return Counts(self.by, prompt)

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        # 1. Count the answer's new tokens.
        for token in answer[self.read :]:
            column = self.place.setdefault(token, len(self.place))
            if column == len(self.counts):
                self.counts.append(0)
            self.counts[column] += 1
        self.read = len(answer)

        # 2. Each row's own counts [N, C]: the answer's, and those of its path.
        place = dict.fromkeys(token for path in paths for token in path if token not in self.place)
        beyond = {token: len(self.counts) + column for column, token in enumerate(place)}
        tokens = torch.tensor([*self.place, *beyond], dtype=torch.int64, device=logits.device)
        base = torch.tensor([*self.counts, *[0] * len(beyond)], dtype=logits.dtype)
        counts = base.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token, number in Counter(path).items():
                counts[row, self.place.get(token, beyond.get(token, 0))] += number
        counts = counts.to(logits.device)

        # 3. Penalise these columns alone.
        columns = logits.index_select(1, tokens)  # [N, C]
        occurred = counts > 0
        if self.by.repetition != 1:
            repeated = occurred.clone()
            repeated[:, : self.prompted] = True
            less = torch.where(
                columns > 0, columns / self.by.repetition, columns * self.by.repetition
            )
            columns = torch.where(repeated, less, columns)
        columns = columns - self.by.frequency * counts - self.by.presence * occurred
        return logits.index_copy(1, tokens, columns)
