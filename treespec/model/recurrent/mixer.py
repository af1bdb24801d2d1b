"""Layers that carry a state from token to token, here called mixers: one over rows of tokens.

The model's own code computes it, with the states of each row handed to it. What that code can do is
found by trial (`probe_mixer`): nothing in a model says it.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import LinearAttentionLayer

from treespec.model.cache import State, TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.recurrent.rows import input_once

TRIAL_FORWARD_TOKENS = 6  # tokens of the forward in which mixers are found
TRIAL_TOKENS = 3  # tokens of a trial
TRIAL_TOLERANCE = (
    0.02  # of the spread of outputs: some models clamp steps in one of the two ways only
)
MAX_EFFECT_SHARE = (
    0.25  # of a state's effect on the outputs; code that does not read the state misses all
)
DELTA_RULE_CHUNK = 64  # tokens: the usual chunk of a delta rule
MAX_ROW_TOKENS = 32  # tokens of a row whose states are all kept: a tree's rows are shorter
STATE_KINDS = ("conv", "recurrent")
Arguments = dict[str, Any]
# States [R, ...] after each step: after the last, and after all where the code took them one by one.
Trail = dict[int, State]


@final
class StateLayer(TreeLayer, LinearAttentionLayer):
    """Keys and values of a `TreeLayer`, if the model's layer has any, and states of one call.

    The states of the sequences lie in `TreeCache.states`; here they are only while the model's own
    code reads and writes them.
    """

    def __init__(self, capacity: int, number_of_states: int) -> None:
        TreeLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers gives keys and values by place, states by name."""
        if args:
            TreeLayer.lazy_initialization(self, *args, **kwargs)
        else:
            LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def load_states(self, numbers: Iterable[int], states: State) -> None:
        """Hold these states, and no others, of these numbers."""
        for number in numbers:
            conv = states.get(("conv", number))
            recurrent = states.get(("recurrent", number))
            has_conv = conv is not None
            has_recurrent = recurrent is not None
            self.conv_states[number] = conv
            self.recurrent_states[number] = recurrent
            self.is_conv_states_initialized[number] = has_conv
            self.is_recurrent_states_initialized[number] = has_recurrent
            self.has_previous_state[number] = has_conv or has_recurrent
            self.conv_kernel_size[number] = None
            if conv is not None:
                self.conv_kernel_size[number] = conv.shape[-1]

    def take_back(self, numbers: Iterable[int]) -> State:
        """The states that the model left, which go."""
        states: State = {}
        for kind, held in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            for number in numbers:
                state = held[number]
                if state is not None:
                    states[kind, number] = state
        self.load_states(numbers, {})
        return states


@final
@dataclass(frozen=True)
class RecurrentLayer:
    """A module that carries a state.

    code: its forward. layer: of the cache, where the code finds its states, under these `numbers`.
    continues: whether its code takes several tokens after an earlier state. Mamba's reads one in
    forwards of one token only.
    chunks: whether it takes the argument `chunk_size`. It pads rows to whole chunks, and those of a
    tree are short.
    """

    module: nn.Module
    code: Callable[..., Any]
    layer: int
    numbers: tuple[int, ...]
    continues: bool = True
    chunks: bool = False

    def run(
        self, cache: TreeCache, constant: Arguments, steps: dict[str, Tensor], state: State
    ) -> tuple[Any, Trail]:
        """The mixer over R rows of L tokens: its outputs [R, L, ...] as its code returns them, and states.

        constant: arguments that do not differ by token. steps: arguments [R, L, ...] that do; the
        first is the layer's input. state: of each row, which the code may change; {} at the start.
        """
        # 1. All tokens at once.
        inputs = next(iter(steps.values()))
        rows, length = inputs.shape[:2]
        if self.continues or length == 1 or not state:
            returned, after = self._call(cache, constant | steps, state, inputs)
            return returned, {length - 1: after}

        # 2. One by one; linear layers over the input take all at once all the same.
        tokens: list[Any] = []
        trail: Trail = {}
        with input_once(self.module, inputs) as begun:
            for i in range(length):
                step = {name: values[:, i : i + 1] for name, values in steps.items()}
                begun.append(next(iter(step.values())))
                copies = {key: part.clone() for key, part in state.items()}
                returned, state = self._call(cache, constant | step, copies, begun[-1])
                tokens.append(returned)
                trail[i] = state
                if length > MAX_ROW_TOKENS:
                    trail.pop(i - 1, None)

        def join(*parts: Any) -> Any:
            if is_by_token(parts[0], rows, 1):
                return torch.cat(parts, 1)
            return parts[-1]

        return tree_map(join, *tokens), trail

    def _call(
        self, cache: TreeCache, arguments: Arguments, state: State, inputs: Tensor
    ) -> tuple[Any, State]:
        """The returned value of the code, and the states that it leaves; short rows go in short chunks."""
        layer = cache.tree_layers[self.layer]
        own = vars(self.module)
        length = inputs.shape[1]
        assert isinstance(layer, StateLayer)
        # A power of two, at least 16 where a GPU wants it.
        smallest = 2 if inputs.is_cpu else 16
        chunk = max(smallest, 1 << (length - 1).bit_length())
        if self.chunks and 1 < length < DELTA_RULE_CHUNK:
            arguments = arguments | {"chunk_size": chunk}
        before = own.get("chunk_size")  # Mamba-2 holds its own
        if before:
            own["chunk_size"] = min(before, chunk)
        layer.load_states(self.numbers, state)
        try:
            returned = self.code(**arguments)
        finally:
            if before:
                own["chunk_size"] = before
            after = layer.take_back(self.numbers)
        return returned, after


def bind_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """The arguments of a call of a module's forward, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def is_by_token(value: object, sequences: int, tokens: int) -> bool:
    """Whether a value is a tensor [sequences, tokens, ...]."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return False
    return value.shape[:2] == (sequences, tokens)


def split_arguments(
    arguments: Arguments, sequences: int, tokens: int
) -> tuple[Arguments, dict[str, Tensor]]:
    """Arguments that are the same for all tokens, and those that are [sequences, tokens, ...].

    The first argument is the layer's input. Masks are left out: paths need none.
    """
    constant: Arguments = {}
    steps: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if "mask" in name:
            constant[name] = None
        elif is_by_token(value, sequences, tokens) and value.ndim < 4:
            steps[name] = value
        else:
            constant[name] = value
    return constant, steps


@torch.no_grad()
def probe_mixer(mixer: RecurrentLayer, cache: TreeCache, arguments: Arguments) -> RecurrentLayer:
    """The mixer with what its code can do: three tokens of one sequence, at once and one by one.

    arguments: of a call with TRIAL tokens of one sequence.
    """
    # 1. A made-up state, larger than a real one; the same with one part of it left out.
    constant, steps = split_arguments(arguments, 1, TRIAL_FORWARD_TOKENS)
    generator = torch.Generator().manual_seed(0)
    state = mixer.run(cache, constant, steps, {})[1][TRIAL_FORWARD_TOKENS - 1]
    steps = {name: values[:, :TRIAL_TOKENS] for name, values in steps.items()}
    for key, part in state.items():
        if part.is_floating_point():
            noise = 0.5 + torch.rand(part.shape, generator=generator)
            state[key] = 10 * part.abs().mean() * noise.to(part)
    cases = [state]
    for key, part in state.items():
        cases.append(state | {key: torch.zeros_like(part)})

    def run_cases(way: RecurrentLayer) -> Tensor:
        """[cases, X] all outputs of each case."""
        rows = []
        for case in cases:
            copies = {key: part.clone() for key, part in case.items()}
            returned, _ = way.run(cache, constant, steps, copies)
            outputs = []
            for part in tree_leaves(returned):
                if is_by_token(part, 1, TRIAL_TOKENS):
                    outputs.append(part.float().flatten())
            rows.append(torch.cat(outputs))
        return torch.stack(rows)

    # 2. The outputs are the same at once and one by one, and so is the effect of each part.
    expected = run_cases(replace(mixer, continues=False))
    effects = expected[1:] - expected[:1]

    def is_equal(way: RecurrentLayer) -> bool:
        try:
            outputs = run_cases(way)
        except Exception:  # a model's own code may raise anything
            return False
        error = (outputs[0] - expected[0]).abs().mean()
        missed = (outputs[1:] - outputs[:1] - effects).abs().mean(1)
        if missed.gt(MAX_EFFECT_SHARE * effects.abs().mean(1)).any():
            return False
        return bool(error <= TRIAL_TOLERANCE * expected[0].std())

    at_once = replace(mixer, continues=True)
    if not is_equal(at_once):
        return replace(mixer, continues=False)
    in_chunks = replace(at_once, chunks=True)
    if is_equal(in_chunks):
        return in_chunks
    return at_once
