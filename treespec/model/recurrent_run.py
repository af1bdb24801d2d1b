"""Layers that carry a state from token to token, here called mixers: one over rows of tokens.

The model's own code computes it, with a state of each row lent to it. What that code can do is found
by trial (`tried`): nothing in a model says it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import LinearAttentionLayer

from treespec.model.cache import State, TreeCache, TreeLayer
from treespec.model.recurrent_rows import input_once

TRIAL = 6  # tokens of the forward in which mixers are found
LENGTH = 3  # tokens of a trial
ALLOWED = 0.02  # of the spread of outputs: some models clamp steps in one of the two ways only
EFFECT = 0.25  # of a state's effect on the outputs; code that does not read the state misses all
CHUNK = 64  # tokens: the usual chunk of a delta rule
DEEPEST = 32  # tokens of a row whose states are all kept: a tree's rows are shorter
Arguments = dict[str, Any]
# States [R, ...] after each step: after the last, and after all where the code took them one by one.
Trail = dict[int, list[State]]


@final
class StateLayer(TreeLayer, LinearAttentionLayer):
    """Keys and values of a `TreeLayer`, if the model's layer has any, and states of one call.

    The states of the texts lie in `TreeCache.states`; here they are only while the model's own code
    reads and writes them.
    """

    device: Any  # of both bases
    dtype: Any

    def __init__(self, capacity: int, number_of_states: int) -> None:
        TreeLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers gives keys and values by place, states by name."""
        base = TreeLayer if args else LinearAttentionLayer
        base.lazy_initialization(self, *args, **kwargs)

    def lend(self, numbers: Sequence[int], states: Sequence[State]) -> None:
        """Hold these states. states: a conv state and a recurrent state for each of `numbers`."""
        for i, number in enumerate(numbers):
            conv, recurrent = states[2 * i : 2 * i + 2]
            self.conv_states[number], self.recurrent_states[number] = conv, recurrent
            self.is_conv_states_initialized[number] = conv is not None
            self.is_recurrent_states_initialized[number] = recurrent is not None
            self.has_previous_state[number] = conv is not None or recurrent is not None
            if conv is not None:
                self.conv_kernel_size[number] = conv.shape[-1]

    def take_back(self, numbers: Sequence[int]) -> list[State]:
        """The states that the model left, which go."""
        states: list[State] = []
        for number in numbers:
            states += [self.conv_states[number], self.recurrent_states[number]]
        self.lend(numbers, [None] * len(states))
        return states


@final
@dataclass(frozen=True)
class Mixer:
    """A module that carries a state: a conv state and a recurrent state for each of `numbers`.

    layer: of the cache, where its code finds them.
    continues: whether its code takes several tokens behind an earlier state. Mamba's reads one in
    forwards of one token only.
    chunks: whether it takes the argument `chunk_size`. It pads rows to whole chunks, and those of a
    tree are short.
    """

    module: nn.Module
    layer: int
    numbers: tuple[int, ...]
    continues: bool = True
    chunks: bool = False

    def fresh(self) -> list[State]:
        """The state before the first token."""
        return [None, None] * len(self.numbers)

    def run(
        self,
        code: Callable[..., Any],
        cache: TreeCache,
        constant: Arguments,
        steps: dict[str, Tensor],
        states: list[State],
    ) -> tuple[Any, Trail]:
        """The mixer over R rows of L tokens: what its code returns, with outputs [R, L, ...], and states.

        code: the module's own forward. constant: arguments that do not differ by token.
        steps: arguments [R, L, ...] that do; the first is the layer's input.
        states: of each row, which the code may change; None before a text.
        """
        # 1. All tokens at once.
        inputs = next(iter(steps.values()))
        rows, length = inputs.shape[:2]
        if self.continues or length == 1 or all(state is None for state in states):
            returned, after = self._call(code, cache, constant | steps, states, inputs)
            return returned, {length - 1: after}

        # 2. One by one; linear layers over the input take all at once all the same.
        tokens: list[Any] = []
        trail: Trail = {}
        with input_once(self.module, inputs) as current:
            for i in range(length):
                step = {name: values[:, i : i + 1] for name, values in steps.items()}
                current[:] = [(next(iter(step.values())), i)]
                copies = [state if state is None else state.clone() for state in states]
                returned, ended = self.run(code, cache, constant, step, copies)
                tokens.append(returned)
                trail[i] = states = ended[0]
                if length > DEEPEST:
                    trail.pop(i - 1, None)

        def joined(*parts: Any) -> Any:
            return torch.cat(parts, 1) if is_by_token(parts[0], rows, 1) else parts[-1]

        return tree_map(joined, *tokens), trail

    def _call(
        self,
        code: Callable[..., Any],
        cache: TreeCache,
        arguments: Arguments,
        states: list[State],
        inputs: Tensor,
    ) -> tuple[Any, list[State]]:
        """What the code returns and the states that it leaves; short rows go in short chunks."""
        length, own = inputs.shape[1], vars(self.module)
        # A power of two, at least 16 where a GPU wants it.
        chunk = max(2 if inputs.device.type == "cpu" else 16, 1 << (length - 1).bit_length())
        if self.chunks and 1 < length < CHUNK:
            arguments = arguments | {"chunk_size": chunk}
        layer, before = (
            cache.tree_layers[self.layer],
            own.get("chunk_size"),
        )  # Mamba-2 holds its own
        assert isinstance(layer, StateLayer)
        layer.lend(self.numbers, states)
        try:
            if isinstance(before, int):
                own["chunk_size"] = min(before, chunk)
            returned = code(**arguments)
        finally:
            if isinstance(before, int):
                own["chunk_size"] = before
            after = layer.take_back(self.numbers)
        return returned, after


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """The arguments of a call of a module's forward, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def is_by_token(value: object, texts: int, tokens: int) -> bool:
    """Whether a value is a tensor [texts, tokens, ...]."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (texts, tokens)


def split(arguments: Arguments, texts: int, tokens: int) -> tuple[Arguments, dict[str, Tensor]]:
    """Arguments that are the same for all tokens, and those that are [texts, tokens, ...].

    The first argument is the layer's input. Masks are left out: paths need none.
    """
    constant = {name: None if "mask" in name else value for name, value in arguments.items()}
    by_token = (name for name in constant if is_by_token(constant[name], texts, tokens))
    steps = {name: arguments[name] for name in by_token if arguments[name].ndim < 4}
    for name in steps:
        del constant[name]
    return constant, steps


@torch.no_grad()
def tried(mixer: Mixer, cache: TreeCache, arguments: Arguments) -> Mixer:
    """The mixer with what its code can do: three tokens of one text, at once and one by one.

    arguments: of a call with TRIAL tokens of one text.
    """
    # 1. A made-up state, larger than a real one; the same with one part of it left out.
    constant, steps = split(arguments, 1, TRIAL)
    code, generator = mixer.module.forward, torch.Generator().manual_seed(0)
    real = mixer.run(code, cache, constant, steps, mixer.fresh())[1][TRIAL - 1]
    steps = {name: values[:, :LENGTH] for name, values in steps.items()}
    states: list[State] = []
    for state in real:
        if state is not None and state.is_floating_point():
            noise = 0.5 + torch.rand(state.shape, generator=generator)
            state = 10 * state.abs().mean() * noise.to(state)
        states.append(state)
    cases = [states]
    for i, state in enumerate(states):
        if state is not None:
            cases.append([*states[:i], torch.zeros_like(state), *states[i + 1 :]])

    # 2. The outputs of each way.
    def outputs(way: Mixer, states: list[State]) -> Tensor:
        """All outputs [X]; NaN, which nothing equals, if the code raises."""
        own = [state if state is None else state.clone() for state in states]
        try:
            found = tree_leaves(way.run(code, cache, constant, steps, own)[0])
            outputs = [part for part in found if is_by_token(part, 1, LENGTH)]
            return torch.cat([output.float().flatten() for output in outputs])
        except Exception:  # a model's own code may raise anything
            return torch.full((1,), torch.nan)

    def same(found: Tensor) -> bool:
        equal = found.shape == expected[0].shape
        return equal and bool((found - expected[0]).abs().mean() <= ALLOWED * expected[0].std())

    at_once = replace(mixer, continues=True)
    expected = [outputs(replace(mixer, continues=False), case) for case in cases]
    found = [outputs(at_once, case) for case in cases]

    # 3. They are the same, and so is the effect of each state.
    continues = same(found[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        effect = expected[0] - other
        continues = continues and bool(
            (found[0] - one - effect).abs().mean() <= EFFECT * effect.abs().mean()
        )
    chunks = continues and same(outputs(replace(at_once, chunks=True), states))
    return replace(mixer, continues=continues, chunks=chunks)
