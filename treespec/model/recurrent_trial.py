"""What a mixer's code can do, found by trial: nothing in a model says it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from treespec.model.cache import TreeCache
from treespec.model.recurrent_mixers import Arguments, Mixer, State
from treespec.model.recurrent_run import Call, split
from treespec.model.recurrent_states import chosen

ALLOWED = 0.02  # of the spread of outputs: some models clamp steps in one of the two ways only
EFFECT = 0.25  # of a state's effect on the outputs; code that does not read the state misses all


@torch.no_grad()
def tried(mixer: Mixer, cache: TreeCache, arguments: Arguments, tokens: int) -> Mixer:
    """The mixer with what its code can do.

    arguments: of a call with that number of tokens of one text.
    """
    trial = Trial(mixer, cache, arguments, tokens)
    single = replace(mixer, continues=False, batches=False)
    batches = trial.same(1, (0, 1), replace(single, batches=True), single)
    at_once = replace(single, continues=True)
    continues = trial.same(3, (0,), at_once, single) and trial.same_effects(3, at_once, single)
    chunks = continues and trial.same(3, (0,), replace(at_once, chunks=True), single)
    return replace(mixer, continues=continues, batches=batches, chunks=chunks)


@final
class Trial:
    """A mixer behind made-up states of two rows, larger than real ones."""

    def __init__(self, mixer: Mixer, cache: TreeCache, arguments: Arguments, tokens: int) -> None:
        self.mixer, self.cache, self.code = mixer, cache, mixer.module.forward
        self.constant, self.steps = split(arguments, 1, tokens)
        fresh = chosen(mixer.store.fresh(self.constant), [0])
        real = Call(mixer, self.code, cache, self.constant, self.steps).run(fresh).states
        generator = torch.Generator().manual_seed(0)
        self.states: list[State] = []
        for state in real:
            if state is None or not state.is_floating_point():
                self.states.append(state if state is None else torch.cat([state, state]))
                continue
            noise = 0.5 + torch.rand(2, *state.shape[1:], generator=generator)
            self.states.append(10 * state.abs().mean() * noise.to(state))

    def outputs(
        self, way: Mixer, length: int, rows: Sequence[int], states: Sequence[State]
    ) -> Tensor | None:
        """All outputs [X] of the first tokens in each row; None if the code raises."""
        steps = {}
        for name, values in self.steps.items():
            steps[name] = values[:, :length].repeat(len(rows), *(1,) * (values.ndim - 1))
        try:
            call = Call(way, self.code, self.cache, self.constant, steps)
            outputs = call.run(chosen(states, rows)).outputs
            return torch.cat([output.float().flatten() for output in outputs.values()])
        except Exception:  # a model's own code may raise anything
            return None

    def same(self, length: int, rows: Sequence[int], one: Mixer, other: Mixer) -> bool:
        """Whether two ways have the same outputs."""
        a = self.outputs(one, length, rows, self.states)
        b = self.outputs(other, length, rows, self.states)
        if a is None or b is None or len(a) != len(b):
            return False
        return bool((a - b).abs().mean() <= ALLOWED * b.std())

    def same_effects(self, length: int, one: Mixer, other: Mixer) -> bool:
        """Whether each state has the same effect on the outputs in two ways."""
        for number, state in enumerate(self.states):
            if state is None:
                continue
            without = list(self.states)
            without[number] = torch.zeros_like(state)
            effects: list[Tensor] = []
            for way in (one, other):
                a = self.outputs(way, length, (0,), self.states)
                b = self.outputs(way, length, (0,), without)
                if a is None or b is None:
                    return False
                effects.append(a - b)
            difference = (effects[0] - effects[1]).abs().mean()
            if not difference <= EFFECT * effects[1].abs().mean():
                return False
        return True
