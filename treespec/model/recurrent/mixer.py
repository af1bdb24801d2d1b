"""Layers that carry a state from token to token, here called mixers, over rows of tokens.

The model's code computes them; we pass it the states of each row. A trial (`probe_mixer`) finds out whether that code
takes several tokens after a state: nothing in a model says it.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import LinearAttentionLayer

from treespec.model.cache import TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.cache_rows import State
from treespec.model.recurrent.rows import input_once

TRIAL_FORWARD_TOKENS = 6  # tokens of the forward in which mixers are found
TRIAL_TOKENS = 3  # tokens of a trial
# Share of the outputs' standard deviation: some models clamp step sizes in only one code path.
TRIAL_TOLERANCE = 0.02
# Share of a state's effect on the outputs; code that ignores the state misses all of it.
MAX_EFFECT_SHARE = 0.25
DELTA_RULE_CHUNK = 64  # tokens: the usual chunk of a delta rule
# Rows up to this length keep the state after each token: a tree's rows are shorter.
MAX_ROW_TOKENS = 32
STATE_KINDS = ("conv", "recurrent")
Arguments = dict[str, Any]
# {step: states [R, ...] after it}: of the last step, or of all steps if the code took tokens one by one.
Trail = dict[int, State]


@final
class StateLayer(TreeLayer, LinearAttentionLayer):
    """Keys and values of a `TreeLayer`, if the model's layer has any, and the recurrent states of one call.

    `TreeCache.states` stores the states of the sequences; this layer holds them only while the model's
    code reads and writes them.
    """

    def __init__(self, capacity: int, number_of_states: int) -> None:
        TreeLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate. transformers passes keys and values by position, and states by name."""
        if args:
            TreeLayer.lazy_initialization(self, *args, **kwargs)
        else:
            LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def load_states(self, numbers: Iterable[int], states: State) -> None:
        """Set the states of these numbers; kinds that `states` lacks are cleared."""
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
        """Return the states that the model has written, and clear them."""
        states: State = {}
        for kind, layer_states in (
            ("conv", self.conv_states),
            ("recurrent", self.recurrent_states),
        ):
            for number in numbers:
                state = layer_states[number]
                if state is not None:
                    states[kind, number] = state
        self.load_states(numbers, {})
        return states


@final
@dataclass(frozen=True)
class RecurrentLayer:
    """A module that carries a state.

    Attributes:
        module: of the model.
        code: its forward.
        layer: index of the cache layer that holds its states.
        numbers: of its states in that layer.
        continues: whether its code takes several tokens after an earlier state. Mamba's reads a state only in
            forwards of one token.
        chunks: whether it takes the argument `chunk_size`. It pads rows to whole chunks, and a tree's rows are short.
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
        """Run the mixer over R rows of L tokens.

        Args:
            cache: whose layer passes the states to the code.
            constant: arguments that do not differ by token.
            steps: arguments [R, L, ...] that differ by token; the first is the layer's input.
            state: by row, before the first token; the code may change it. {} at the start of a text.

        Returns: the outputs [R, L, ...] as the code returns them, and the states after steps.
        """
        # 1. All tokens at once.
        inputs = next(iter(steps.values()))
        rows, length = inputs.shape[:2]
        if self.continues or length == 1 or not state:
            returned, new_state = self._call(cache, constant | steps, state, inputs)
            return returned, {length - 1: new_state}

        # 2. Tokens one by one, but linear layers over the input compute all tokens at the first.
        tokens: list[Any] = []
        trail: Trail = {}
        with input_once(self.module, inputs) as first_inputs:
            for i in range(length):
                step = {name: values[:, i : i + 1] for name, values in steps.items()}
                first_inputs.append(next(iter(step.values())))
                copies = {key: part.clone() for key, part in state.items()}
                returned, state = self._call(cache, constant | step, copies, first_inputs[-1])
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
        """Call the code, with short chunks for short rows. Returns its value, and the states after it."""
        layer = cache.tree_layers[self.layer]
        attributes = vars(self.module)
        length = inputs.shape[1]
        assert isinstance(layer, StateLayer)
        # A power of two, at least 16 on a GPU, whose kernels need it.
        smallest = 2 if inputs.is_cpu else 16
        chunk = max(smallest, 1 << (length - 1).bit_length())
        if self.chunks and 1 < length < DELTA_RULE_CHUNK:
            arguments = arguments | {"chunk_size": chunk}
        module_chunk = attributes.get(
            "chunk_size"
        )  # Mamba-2 has an attribute instead of an argument
        if module_chunk:
            attributes["chunk_size"] = min(module_chunk, chunk)
        layer.load_states(self.numbers, state)
        try:
            returned = self.code(**arguments)
        finally:
            if module_chunk:
                attributes["chunk_size"] = module_chunk
            new_state = layer.take_back(self.numbers)
        return returned, new_state


def bind_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Return the arguments of a call of a module's forward, by name."""
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
    """Split arguments into those that are the same for all tokens, and those of shape [sequences, tokens, ...].

    The first argument is the layer's input. Masks become None: paths need none.
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
    """Find out whether a mixer's code takes three tokens at once as one by one. Returns it with the flags set.

    Args:
        mixer: to probe.
        cache: of the trial.
        arguments: of a call with `TRIAL_FORWARD_TOKENS` tokens of one sequence.
    """
    # 1. A random state, larger than a real one; then the same state with one of its parts set to 0.
    constant, steps = split_arguments(arguments, 1, TRIAL_FORWARD_TOKENS)
    generator = torch.Generator().manual_seed(0)
    state = mixer.run(cache, constant, steps, {})[1][TRIAL_FORWARD_TOKENS - 1]
    steps = {name: values[:, :TRIAL_TOKENS] for name, values in steps.items()}
    for key, part in state.items():
        if part.is_floating_point():
            noise = 0.5 + torch.rand(
                part.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            state[key] = 10 * part.abs().mean() * noise.to(part)
    cases = [state]
    for key, part in state.items():
        cases.append(state | {key: torch.zeros_like(part)})

    def run_cases(variant: RecurrentLayer) -> Tensor:
        """Return [cases, X] all outputs of each case."""
        rows = []
        for case in cases:
            copies = {key: part.clone() for key, part in case.items()}
            returned, _ = variant.run(cache, constant, steps, copies)
            outputs = []
            for part in tree_leaves(returned):
                if is_by_token(part, 1, TRIAL_TOKENS):
                    outputs.append(part.float().flatten())
            rows.append(torch.cat(outputs))
        return torch.stack(rows)

    # 2. Outputs at once must equal outputs one by one, and so must the effect of each part of the state.
    expected = run_cases(replace(mixer, continues=False))
    effects = expected[1:] - expected[:1]

    def is_equal(variant: RecurrentLayer) -> bool:
        try:
            outputs = run_cases(variant)
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
