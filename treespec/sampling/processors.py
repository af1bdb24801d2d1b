"""Logits processors of a request: biases, penalties, a least length, transformers' own."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, Self, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.sampling.params import LogitOptions
from treespec.trees.tree import to_device

Paths: TypeAlias = Sequence[Sequence[int]]


@runtime_checkable
class TreeLogitsProcessor(Protocol):
    """Changes the logits after a text, before temperature, top-k and the rest; one object a sequence.

    Draft logits and target logits go through the same processors, each row by its own path. So the draws still
    have the draft distribution, and verification is lossless for the changed target distribution.
    """

    def begin(self, prompt: Sequence[int]) -> "TreeLogitsProcessor":
        """A fresh one for a sequence with this prompt."""
        ...

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        """New logits [N, V] of the token that follows `answer + paths[i]`; -inf forbids a token.

        answer: the committed tokens after the prompt; it only grows from call to call. logits: [N,
        V] in float32 or float64, not to be changed in place. A path may hold tokens that the processor
        itself forbids. No text goes there, so any logits will do.
        """
        ...


class Unprompted:
    """A processor that no prompt changes."""

    def begin(self, prompt: Sequence[int]) -> Self:
        return self


@final
@dataclass(frozen=True)
class LogitBias(Unprompted):
    """Adds a number to the logits of some tokens, as OpenAI's `logit_bias`; -inf forbids a token.

    tokens, values: as long as each other.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        tokens = to_device(self.tokens, logits.device)
        values = to_device(torch.tensor(self.values, dtype=logits.dtype), logits.device)
        return logits.index_add(1, tokens, values.expand(len(logits), -1))


@final
@dataclass(frozen=True)
class MinTokens(Unprompted):
    """Forbids the end tokens before the answer has `least` tokens.

    ends: the tokens that end an answer.
    """

    least: int
    ends: tuple[int, ...]

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        early = [len(answer) + len(path) < self.least for path in paths]
        if not any(early):
            return logits
        ends = to_device(torch.tensor(self.ends, dtype=torch.int64), logits.device)
        rows = to_device(early, logits.device)[:, None]
        return logits.index_fill(1, ends, -torch.inf).where(rows, logits)


@final
@dataclass(frozen=True)
class Penalties:
    """Makes tokens less likely that the prompt or the answer holds.

    repetition: divides the positive logits of all tokens of prompt and answer, and multiplies the
    negative ones (Keskar et al. 2019, 1909.05858); transformers and vLLM count the same. 1 is off.
    presence, frequency: subtracted from the logits of the answer's tokens, once for each token and
    once for each of its occurrences (OpenAI's API reference). 0 is off. Below 1 or 0 they make
    tokens more likely.
    prompt: its distinct tokens, where they count.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()

    def begin(self, prompt: Sequence[int]) -> "Penalties":
        if self.repetition == 1:
            return replace(self, prompt=())
        return replace(self, prompt=tuple(dict.fromkeys(prompt)))

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        # 1. A column for each token that occurred, the prompt's first.
        column: dict[int, int] = {}
        for token in chain(self.prompt, answer, chain.from_iterable(paths)):
            column.setdefault(token, len(column))
        tokens = to_device(torch.tensor(list(column), dtype=torch.int64), logits.device)

        # 2. How often the answer and a row's own path hold it [N, C].
        in_answer = Counter(answer)
        counts = torch.tensor(list(map(in_answer.__getitem__, column)), dtype=logits.dtype)
        counts = counts.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, column[token]] += 1
        counts = to_device(counts, logits.device)

        # 3. Penalise these columns alone.
        columns = logits.index_select(1, tokens)  # [N, C]
        repeated = counts > 0
        less = self.presence * repeated + self.frequency * counts
        repeated[:, : len(self.prompt)] = True
        by = self.repetition
        penalised = torch.where(columns > 0, columns / by, columns * by)
        return logits.index_copy(1, tokens, penalised.where(repeated, columns) - less)


# (input_ids [B, T] int64, scores [B, V]) -> scores [B, V]
Processor: TypeAlias = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class TransformersProcessor:
    """Calls a processor with the tokens of prompt, answer and path; rows of one length together.

    A processor must be a function of its arguments: it is asked about many paths, in any order.
    Raises InputError where the scores that it returns have another shape, or are not numbers.
    """

    processor: Processor
    prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> "TransformersProcessor":
        return replace(self, prompt=tuple(prompt))

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        shaped = torch.empty_like(logits)
        by_length = defaultdict(list)
        for row, path in enumerate(paths):
            by_length[len(path)].append(row)
        for rows in by_length.values():
            text = list(self.prompt) + list(answer)
            texts = [text + list(paths[row]) for row in rows]
            tokens = torch.tensor(texts, dtype=torch.int64, device=logits.device)  # [B, T]
            scores = self.processor(tokens, logits[rows])  # it may change its logits in place
            shape = (len(rows), logits.shape[1])
            if not isinstance(scores, Tensor) or scores.shape != shape:
                raise InputError(f"a logits processor must return scores of shape {shape}")
            if scores.isnan().any():
                raise InputError("a logits processor returned scores that are not numbers")
            shaped[rows] = scores
        return shaped


def build_processors(options: LogitOptions) -> Iterator[TreeLogitsProcessor]:
    """The processors that options ask for, in the order in which they act; none has begun.

    transformers and vLLM add biases before they penalise, too. Raises InputError for a logits
    processor that is none.
    """
    bias = options.logit_bias
    if bias:
        yield LogitBias(tuple(bias), tuple(bias.values()))
    penalties = Penalties(
        options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    )
    if penalties != Penalties():
        yield penalties
    processors = options.logits_processor
    if not isinstance(processors, Sequence):
        processors = [processors]
    for processor in processors:
        if isinstance(processor, TreeLogitsProcessor):
            yield processor
        elif callable(processor):
            yield TransformersProcessor(processor)
        else:
            raise InputError(
                f"logits_processor is {processor!r:.40}, must be a function of token ids and scores"
            )
