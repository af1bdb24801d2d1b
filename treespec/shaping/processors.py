"""Logits processors of a request: biases, penalties, a least length, transformers' own."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.shaping.options import LogitOptions


@runtime_checkable
class Shaper(Protocol):
    """Changes the logits after a text, before temperature, top-k and the rest; one object a text.

    Draft logits and target logits go through the same shapers, each row by its own path. So the
    draft law stays the law of the draws, and verification is lossless for the shaped target law.
    """

    def begin(self, prompt: Sequence[int]) -> "Shaper":
        """A fresh one for a text with this prompt."""
        ...

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        """New logits [N, V] of the token that follows `answer + paths[i]`; -inf forbids a token.

        answer: the committed tokens after the prompt; it only grows from call to call. logits: [N,
        V] in float32 or float64, not to be changed in place. A path may hold tokens that the shaper
        itself forbids. No text goes there, so any logits will do.
        """
        ...


@final
@dataclass(frozen=True)
class Bias:
    """Adds a number to the logits of some tokens, as OpenAI's `logit_bias`; -inf forbids a token.

    tokens, values: as long as each other.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def begin(self, prompt: Sequence[int]) -> "Bias":
        return self

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        tokens = torch.tensor(self.tokens, device=logits.device)
        values = torch.tensor(self.values, dtype=logits.dtype, device=logits.device)
        return logits.index_add(1, tokens, values.expand(len(logits), -1))


@final
@dataclass(frozen=True)
class LeastTokens:
    """Forbids the end tokens before the answer has `least` tokens.

    ends: the tokens that end an answer.
    """

    least: int
    ends: tuple[int, ...]

    def begin(self, prompt: Sequence[int]) -> "LeastTokens":
        return self

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        rows = [row for row, path in enumerate(paths) if len(answer) + len(path) < self.least]
        if not rows or not self.ends:
            return logits
        ends = torch.tensor(self.ends, device=logits.device)
        early = torch.tensor(rows, device=logits.device)
        return logits.index_put((early[:, None], ends), logits.new_tensor(-torch.inf))


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


# (input_ids [B, T] int64, scores [B, V]) -> scores [B, V]
Processor: TypeAlias = Callable[..., Tensor]


@final
class Processed:
    """Calls a processor with the tokens of prompt, answer and path; rows of one length together.

    A processor must be a function of its arguments: it is asked about many paths, in any order.
    Raises InputError where the scores that it returns have another shape, or are not numbers.
    """

    def __init__(self, processor: Processor, prompt: Sequence[int] = ()) -> None:
        self.processor, self.prompt = processor, list(prompt)

    def begin(self, prompt: Sequence[int]) -> "Processed":
        return Processed(self.processor, prompt)

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        shaped = torch.empty_like(logits)
        for length in {len(path) for path in paths}:
            rows = [row for row, path in enumerate(paths) if len(path) == length]
            known = torch.tensor([*self.prompt, *answer]).expand(len(rows), -1)
            own = torch.tensor([list(paths[row]) for row in rows], dtype=torch.int64)
            tokens = torch.cat([known, own], dim=1).to(logits.device)  # [B, T]
            index = torch.tensor(rows, device=logits.device)
            shaped[index] = self._scores(tokens, logits[index])
        return shaped

    def _scores(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """tokens: [B, T]. logits: [B, V], which the processor may change in place."""
        wanted = logits.shape
        scores = self.processor(tokens, logits)
        name = getattr(self.processor, "__name__", type(self.processor).__name__)
        if not isinstance(scores, Tensor) or scores.shape != wanted:
            given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InputError(
                f"the logits processor {name} returned {given}, must return scores {list(wanted)}"
            )
        if scores.isnan().any():
            raise InputError(f"the logits processor {name} returned scores that are not numbers")
        return scores


def shapers_of(options: LogitOptions) -> Iterator[Shaper]:
    """The shapers that options ask for, in the order in which they act; none has begun.

    transformers and vLLM add biases before they penalise, too. Raises InputError for a logits
    processor that is none.
    """
    if bias := options.logit_bias:
        yield Bias(tuple(bias), tuple(bias.values()))
    penalties = Penalties(
        options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    )
    if penalties != Penalties():
        yield Counts(penalties)
    given = options.logits_processor
    for place, one in enumerate(given if isinstance(given, Sequence) else [given], 1):
        if isinstance(one, Shaper):
            yield one
        elif callable(one):
            yield Processed(one)
        else:
            raise InputError(
                f"logits_processor {place} is {one!r:.40}, must be a function of token ids and "
                "scores"
            )
