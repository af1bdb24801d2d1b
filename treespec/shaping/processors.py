"""transformers' logits processors: functions of the token ids so far and their scores."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

from treespec.errors import InputError

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
