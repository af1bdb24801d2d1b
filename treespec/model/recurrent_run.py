"""One mixer over rows of tokens: its own code, with a state of each row lent to it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.model.cache import TreeCache
from treespec.model.recurrent_dense import input_once
from treespec.model.recurrent_mixers import Arguments, Mixer, State

CHUNK = 64  # tokens: the usual chunk of a delta rule
DEEPEST = 32  # tokens of a row whose states are all kept: a tree's rows are shorter
Code = Callable[..., Any]
Outputs = dict[int, Tensor]  # by place in the tuple that the code returned; 0 without a tuple


@final
@dataclass(frozen=True)
class Ran:
    """What a mixer gave for R rows of L tokens.

    outputs: [R, L, ...]. returned: what its code returned last. states: [R, ...] after the last
    token. trail: states after each token, where the code took them one by one.
    """

    outputs: Outputs
    returned: Any
    states: list[State]
    trail: list[list[State]] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Call:
    """A mixer over R rows of L tokens.

    code: the module's own forward. constant: arguments that do not differ by token.
    steps: arguments [R, L, ...] that do; the first is the layer's input.
    """

    mixer: Mixer
    code: Code
    cache: TreeCache
    constant: Arguments
    steps: dict[str, Tensor]

    @property
    def input(self) -> Tensor:
        return next(iter(self.steps.values()))

    def run(self, states: Sequence[State]) -> Ran:
        """states: of each row, to be changed; None before a text."""
        rows, length = self.input.shape[:2]
        if length == 1 and rows > 1 and not self.mixer.batches:
            return self._row_by_row(states)
        is_fresh = all(state is None for state in states)
        if self.mixer.continues or length == 1 or is_fresh:
            return self._at_once(states)
        return self._token_by_token(states)

    def _at_once(self, states: Sequence[State]) -> Ran:
        (rows, length), device = self.input.shape[:2], self.input.device
        arguments: Arguments = self.constant | self.steps
        if self.mixer.chunks and 1 < length < CHUNK:
            arguments["chunk_size"] = chunk_for(length, device)
        self.mixer.store.lend(self.cache, arguments, states)
        try:
            with short_chunks(self.mixer.module, length, device):
                returned = self.code(**arguments)
        finally:
            left = self.mixer.store.take_back(self.cache, arguments)
        parts = returned if isinstance(returned, tuple) else (returned,)
        outputs = {i: part for i, part in enumerate(parts) if is_by_token(part, rows, length)}
        return Ran(outputs, returned, left)

    def _token_by_token(self, states: Sequence[State]) -> Ran:
        """Linear layers over the input take all tokens at once all the same."""
        outputs: list[Outputs] = []
        trail: list[list[State]] = []
        length = self.input.shape[1]
        with input_once(self.mixer.module, self.input) as current:
            for i in range(length):
                step = {name: values[:, i : i + 1] for name, values in self.steps.items()}
                one = replace(self, steps=step)
                current[:] = [(one.input, i)]
                ran = one._at_once([state if state is None else state.clone() for state in states])
                outputs.append(ran.outputs)
                states = ran.states
                if length <= DEEPEST:
                    trail.append(ran.states)
        joined = {place: torch.cat([one[place] for one in outputs], dim=1) for place in outputs[0]}
        return Ran(joined, ran.returned, list(states), trail)

    def _row_by_row(self, states: Sequence[State]) -> Ran:
        parts: list[Ran] = []
        for row in range(len(self.input)):
            steps = {name: values[row : row + 1] for name, values in self.steps.items()}
            lent = [state if state is None else state[row : row + 1] for state in states]
            parts.append(replace(self, steps=steps)._at_once(lent))
        outputs = {
            place: torch.cat([part.outputs[place] for part in parts]) for place in parts[0].outputs
        }
        joined: list[State] = []
        for column in zip(*(part.states for part in parts), strict=True):
            held = [state for state in column if state is not None]
            joined.append(torch.cat(held) if held else None)
        return Ran(outputs, parts[-1].returned, joined)


def chunk_for(length: int, device: torch.device) -> int:
    """The chunk for rows of `length` tokens: a power of two, at least 16 where a GPU wants it."""
    return max(2 if device.type == "cpu" else 16, 1 << (length - 1).bit_length())


@contextmanager
def short_chunks(module: nn.Module, length: int, device: torch.device) -> Iterator[None]:
    """Inside, a module with an attribute `chunk_size` (Mamba-2) pads rows to no more than needed."""
    before = vars(module).get("chunk_size")
    try:
        if isinstance(before, int):
            vars(module)["chunk_size"] = min(before, chunk_for(length, device))
        yield
    finally:
        if isinstance(before, int):
            vars(module)["chunk_size"] = before


def is_by_token(value: object, texts: int, tokens: int) -> bool:
    """Whether a value is a tensor [texts, tokens, ...]."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (texts, tokens)


def split(arguments: Arguments, texts: int, tokens: int) -> tuple[Arguments, dict[str, Tensor]]:
    """Arguments that are the same for all tokens, and those that are [texts, tokens, ...].

    The first argument is the layer's input. Masks are left out: paths need none.
    """
    constant: Arguments = {}
    steps: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if "mask" in name:
            constant[name] = None
        elif is_by_token(value, texts, tokens) and value.ndim < 4:
            steps[name] = value
        else:
            constant[name] = value
    return constant, steps


def answered(returned: Any, outputs: Outputs, state: Any) -> Any:
    """What the code returned, with these outputs in place of its own.

    state: the caller's own `state` argument, which some code returns.
    """
    if not isinstance(returned, tuple):
        return outputs[0]
    parts = [state if isinstance(part, list) else part for part in returned]
    return tuple(outputs.get(i, part) for i, part in enumerate(parts))
