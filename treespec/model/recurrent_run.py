"""One mixer over rows of tokens: its own code, with a state of each row lent to it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from treespec.cache import TreeCache
from treespec.model.recurrent_mixers import Arguments, Mixer, State

CHUNK = 64  # tokens: the usual chunk of a delta rule
Code = Callable[..., Any]
Outputs = dict[int, Tensor]  # by place in the tuple that the code returned; 0 without a tuple


def run(
    mixer: Mixer,
    code: Code,
    cache: TreeCache,
    constant: Arguments,
    steps: dict[str, Tensor],
    states: Sequence[State],
) -> tuple[Outputs, Any, list[State]]:
    """Outputs [R, L, ...] of a mixer, what its code returned, and the states after the last step.

    code: the module's own forward. constant: arguments that do not differ by token.
    steps: arguments [R, L, ...] that do. states: of each row, to be changed; None before a text.
    """
    # 1. In one call where the code allows that.
    rows, length = next(iter(steps.values())).shape[:2]
    if length == 1 and rows > 1 and not mixer.batches:
        return row_by_row(mixer, code, cache, constant, steps, states)
    is_fresh = all(state is None for state in states)
    if mixer.continues or length == 1 or is_fresh:
        return called(mixer, code, cache, constant, steps, states)

    # 2. Token by token.
    parts: list[Outputs] = []
    for i in range(length):
        step = {name: values[:, i : i + 1] for name, values in steps.items()}
        outputs, returned, states = called(mixer, code, cache, constant, step, states)
        parts.append(outputs)
    joined = {place: torch.cat([part[place] for part in parts], dim=1) for place in parts[0]}
    return joined, returned, list(states)


def row_by_row(
    mixer: Mixer,
    code: Code,
    cache: TreeCache,
    constant: Arguments,
    steps: dict[str, Tensor],
    states: Sequence[State],
) -> tuple[Outputs, Any, list[State]]:
    """`run` over one token of several rows, a call each."""
    parts: list[Outputs] = []
    lefts: list[list[State]] = []
    for row in range(len(next(iter(steps.values())))):
        step = {name: values[row : row + 1] for name, values in steps.items()}
        lent = [state if state is None else state[row : row + 1] for state in states]
        outputs, returned, left = called(mixer, code, cache, constant, step, lent)
        parts.append(outputs)
        lefts.append(left)
    joined = {place: torch.cat([part[place] for part in parts]) for place in parts[0]}
    states_left = [
        torch.cat([state for state in column if state is not None])
        if column[0] is not None
        else None
        for column in zip(*lefts, strict=True)
    ]
    return joined, returned, states_left


def called(
    mixer: Mixer,
    code: Code,
    cache: TreeCache,
    constant: Arguments,
    steps: dict[str, Tensor],
    states: Sequence[State],
) -> tuple[Outputs, Any, list[State]]:
    """`run` in one call."""
    rows, length = next(iter(steps.values())).shape[:2]
    arguments: Arguments = constant | steps
    if mixer.chunks and 1 < length < CHUNK:
        arguments["chunk_size"] = chunk_for(length)
    mixer.store.lend(cache, arguments, states)
    try:
        with short_chunks(mixer.module, length):
            returned = code(**arguments)
    finally:
        left = mixer.store.take_back(cache, arguments)
    parts = returned if isinstance(returned, tuple) else (returned,)
    outputs = {i: part for i, part in enumerate(parts) if is_by_token(part, rows, length)}
    return outputs, returned, left


def chunk_for(length: int) -> int:
    """The chunk for rows of `length` tokens: a power of two, at least 16 as GPUs want it."""
    return max(16, 1 << (length - 1).bit_length())


@contextmanager
def short_chunks(module: nn.Module, length: int) -> Iterator[None]:
    """Inside, a module with an attribute `chunk_size` (Mamba-2) pads rows to no more than needed."""
    before = vars(module).get("chunk_size")
    try:
        if isinstance(before, int):
            vars(module)["chunk_size"] = min(before, chunk_for(length))
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
