"""Logits processors of a request: biases, penalties, a minimum length, and those of transformers."""

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

Paths: TypeAlias = Sequence[
    Sequence[int]
]  # for each row of logits, the tokens from below the root to its node


@runtime_checkable
class TreeLogitsProcessor(Protocol):
    """Changes logits before temperature, top-k and the like are applied. Each request has its own object.

    Draft logits and target logits go through the same processors, each row by the path of its node. So the
    draws still have the draft distribution, and verification is lossless for the changed target
    distribution. Of a tree with five nodes, after the answer `a`, a frequency penalty of 1 subtracts:

                       node   path      a   b   c   d   e
        r ─┬─ a ── c   r      ()        1   0   0   0   0
           └─ b ── d   a      (a)       2   0   0   0   0
                       b      (b)       1   1   0   0   0
                       c      (a, c)    2   0   1   0   0
                       d      (b, d)    1   1   0   1   0
    """

    def begin(self, prompt: Sequence[int]) -> "TreeLogitsProcessor":
        """Return a new processor for a request with this prompt."""
        ...

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        """Compute new logits: row i is for the token that follows `answer + paths[i]`; -inf forbids a token.

        A path may contain tokens that the processor itself forbids. No answer gets there, so its row
        may have any values.

        answer: the committed tokens after the prompt; it only grows from call to call. paths: tokens
        from below the root down to each of N nodes. logits: [N, V] in float32 or float64, not to be
        changed in place. Returns [N, V].
        """
        ...


class Unprompted:
    """Base of processors that do not depend on the prompt, and have no state."""

    def begin(self, prompt: Sequence[int]) -> Self:
        return self


@final
@dataclass(frozen=True)
class LogitBias(Unprompted):
    """Adds a number to the logits of some tokens, as OpenAI's `logit_bias`; -inf forbids a token.

    tokens: the token ids. values: the number for each of them.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        tokens = to_device(self.tokens, logits.device)
        values = to_device(
            torch.tensor(self.values, dtype=logits.dtype, device="cpu"), logits.device
        )
        return logits.index_add(1, tokens, values.expand(len(logits), -1))


@final
@dataclass(frozen=True)
class MinTokens(Unprompted):
    """Forbids the tokens `ends` until the answer has `least` tokens.

    ends: the tokens that end an answer.
    """

    least: int
    ends: tuple[int, ...]

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        early = [len(answer) + len(path) < self.least for path in paths]
        if not any(early):
            return logits
        ends = to_device(torch.tensor(self.ends, dtype=torch.int64, device="cpu"), logits.device)
        rows = to_device(early, logits.device)[:, None]
        return logits.index_fill(1, ends, -torch.inf).where(rows, logits)


@final
@dataclass(frozen=True)
class Penalties:
    """Makes tokens less likely that occur in the prompt or in the answer; with values below "off", more likely.

    Attributes:
        repetition: Divides the positive logits of all tokens of prompt and answer, and multiplies the
            negative ones (Keskar et al. 2019, 1909.05858), as in transformers and vLLM. Default: 1, off.
        presence: Subtracted from the logits of the answer's tokens, once for each token (OpenAI's API
            reference). Default: 0, off.
        frequency: Subtracted once for each occurrence of the token. Default: 0, off.
        prompt: The prompt's distinct tokens; empty if `repetition` is off, as only that counts them.
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
        tokens = to_device(
            torch.tensor(list(column), dtype=torch.int64, device="cpu"), logits.device
        )

        # 2. How often it occurs in the answer and in the row's path [N, C].
        in_answer = Counter(answer)
        counts = torch.tensor(
            list(map(in_answer.__getitem__, column)), dtype=logits.dtype, device="cpu"
        )
        counts = counts.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, column[token]] += 1
        counts = to_device(counts, logits.device)

        # 3. Penalise only these columns.
        columns = logits.index_select(1, tokens)  # [N, C]
        repeated = counts > 0
        penalty = self.presence * repeated.to(counts.dtype) + self.frequency * counts
        repeated[:, : len(self.prompt)] = True
        factor = self.repetition
        scaled = torch.where(columns > 0, columns / factor, columns * factor)
        return logits.index_copy(1, tokens, scaled.where(repeated, columns) - penalty)


# (input_ids [B, T] int64, scores [B, V]) -> scores [B, V]
Processor: TypeAlias = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class TransformersProcessor:
    """Calls a transformers processor with the tokens of prompt, answer and path; rows of equal length together.

    The processor must be a pure function of its arguments: it is called for many paths, in any order.
    Raises InputError if the returned scores have another shape, or contain NaN.
    """

    processor: Processor
    prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> "TransformersProcessor":
        return replace(self, prompt=tuple(prompt))

    def process_logits(self, answer: Sequence[int], paths: Paths, logits: Tensor) -> Tensor:
        processed = torch.empty_like(logits)
        rows_by_length = defaultdict(list)
        for row, path in enumerate(paths):
            rows_by_length[len(path)].append(row)
        for rows in rows_by_length.values():
            committed = list(self.prompt) + list(answer)
            sequences = [committed + list(paths[row]) for row in rows]
            tokens = torch.tensor(sequences, dtype=torch.int64, device=logits.device)  # [B, T]
            scores = self.processor(tokens, logits[rows])  # a copy, which it may change in place
            shape = (len(rows), logits.shape[1])
            if not isinstance(scores, Tensor) or scores.shape != shape:
                raise InputError(f"a logits processor must return scores of shape {shape}")
            if scores.isnan().any():
                raise InputError("a logits processor returned scores that are not numbers")
            processed[rows] = scores.to(processed.dtype)
        return processed


def build_processors(options: LogitOptions) -> Iterator[TreeLogitsProcessor]:
    """Build the processors of a request's options, in the order in which they are applied.

    As in transformers and vLLM, biases come before penalties. Call `begin` of each before use. Raises
    InputError if a logits processor is not callable.
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
