"""One mixer over rows of tokens: its own code, with a state of each row lent to it.

What that code can do is found by trial (`tried`): nothing in a model says it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.model.cache import TreeCache
from treespec.model.recurrent_mixers import Arguments, Mixer, State
from treespec.model.recurrent_rows import input_once

ALLOWED = 0.02  # of the spread of outputs: some models clamp steps in one of the two ways only
LENGTH = 3  # tokens of a trial
EFFECT = 0.25  # of a state's effect on the outputs; code that does not read the state misses all
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
        length = self.input.shape[1]
        is_fresh = all(state is None for state in states)
        if self.mixer.continues or length == 1 or is_fresh:
            return self._at_once(states)
        return self._token_by_token(states)

    def _at_once(self, states: Sequence[State]) -> Ran:
        (rows, length), device = self.input.shape[:2], self.input.device
        arguments: Arguments = self.constant | self.steps
        if self.mixer.chunks and 1 < length < CHUNK:
            arguments["chunk_size"] = chunk_for(length, device)
        layer = self.mixer.state_layer(self.cache)
        layer.lend(self.mixer.numbers, states)
        try:
            with short_chunks(self.mixer.module, length, device):
                returned = self.code(**arguments)
        finally:
            left = layer.take_back(self.mixer.numbers)
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


def answered(returned: Any, outputs: Outputs) -> Any:
    """What the code returned, with these outputs instead of its own."""
    if not isinstance(returned, tuple):
        return outputs[0]
    return tuple(outputs.get(i, part) for i, part in enumerate(returned))


@torch.no_grad()
def tried(mixer: Mixer, cache: TreeCache, arguments: Arguments, tokens: int) -> Mixer:
    """The mixer with what its code can do.

    arguments: of a call with that number of tokens of one text.
    """
    trial = Trial(mixer, cache, arguments, tokens)
    single, at_once = replace(mixer, continues=False), replace(mixer, continues=True)
    continues = trial.same(at_once, single) and trial.same_effects(at_once, single)
    chunks = continues and trial.same(replace(at_once, chunks=True), single)
    return replace(mixer, continues=continues, chunks=chunks)


@final
class Trial:
    """A mixer over three tokens of one text behind a made-up state, larger than a real one."""

    def __init__(self, mixer: Mixer, cache: TreeCache, arguments: Arguments, tokens: int) -> None:
        self.mixer, self.cache, self.code = mixer, cache, mixer.module.forward
        self.constant, self.steps = split(arguments, 1, tokens)
        real = Call(mixer, self.code, cache, self.constant, self.steps).run(mixer.fresh()).states
        self.steps = {name: values[:, :LENGTH] for name, values in self.steps.items()}
        generator = torch.Generator().manual_seed(0)
        self.states: list[State] = []
        for state in real:
            if state is None or not state.is_floating_point():
                self.states.append(state)
                continue
            noise = 0.5 + torch.rand(state.shape, generator=generator)
            self.states.append(10 * state.abs().mean() * noise.to(state))

    def outputs(self, way: Mixer, states: Sequence[State]) -> Tensor | None:
        """All outputs [X]; None if the code raises."""
        own = [state if state is None else state.clone() for state in states]
        try:
            outputs = Call(way, self.code, self.cache, self.constant, self.steps).run(own).outputs
            return torch.cat([output.float().flatten() for output in outputs.values()])
        except Exception:  # a model's own code may raise anything
            return None

    def same(self, one: Mixer, other: Mixer) -> bool:
        """Whether two ways have the same outputs."""
        a, b = self.outputs(one, self.states), self.outputs(other, self.states)
        if a is None or b is None or len(a) != len(b):
            return False
        return bool((a - b).abs().mean() <= ALLOWED * b.std())

    def same_effects(self, one: Mixer, other: Mixer) -> bool:
        """Whether each state has the same effect on the outputs in two ways."""
        for number, state in enumerate(self.states):
            if state is None:
                continue
            without = list(self.states)
            without[number] = torch.zeros_like(state)
            effects: list[Tensor] = []
            for way in (one, other):
                a = self.outputs(way, self.states)
                b = self.outputs(way, without)
                if a is None or b is None:
                    return False
                effects.append(a - b)
            difference = (effects[0] - effects[1]).abs().mean()
            if not difference <= EFFECT * effects[1].abs().mean():
                return False
        return True
