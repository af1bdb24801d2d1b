"""A layer of the cache that lends a recurrent layer its state, as transformers' models take it."""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from treespec.model.cache import TreeLayer

State = Tensor | None


@final
class StateLayer(TreeLayer, LinearAttentionLayer):
    """Keys and values of a `TreeLayer`, if the model's layer has any, and states of one call.

    The states of the texts lie in `treespec.model.recurrent_states.States`; here they are only
    while the model's own code reads and writes them.
    """

    device: Any  # of both bases
    dtype: Any

    def __init__(self, capacity: int, number_of_states: int) -> None:
        TreeLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers gives keys and values by place, states by name."""
        if args:
            TreeLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

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
