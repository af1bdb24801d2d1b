"""Targets with layers that carry a state from token to token: Mamba, delta nets, RWKV and others.

Attention layers of such a model take trees by their masks, as in any model. A recurrent layer takes a
tree as a batch of its paths (`recurrent_rows`), each behind the state of its text
(`recurrent_states`). The layer's own code computes both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from treespec.cache import TreeCache, TreeLayer
from treespec.errors import InputError, first_line
from treespec.model.masks import Masks
from treespec.model.recurrent_dense import once_a_node, replaced
from treespec.model.recurrent_layer import StateLayer
from treespec.model.recurrent_mixers import (
    TRIAL,
    Arguments,
    Mixer,
    State,
    arguments_of,
    find_stores,
    parameters_of,
)
from treespec.model.recurrent_rows import PathRows, path_rows
from treespec.model.recurrent_run import answered, run, split
from treespec.model.recurrent_states import Forwarded, RecurrentStates, chosen


@final
class Recurrent:
    """The mixers of a target.

    has_attention: whether any layer keeps keys and values.
    continues: whether all mixers take several tokens behind an earlier state.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, decoder: nn.Module, layers: int) -> None:
        """Raises InputError where no module's state is found."""
        # 1. The layers of a cache, as transformers' own has them.
        known = DynamicCache(config=model.config.get_text_config()).layers
        self.mixers: list[Mixer] = []
        self.states = [getattr(layer, "number_of_states", 0) for layer in known]
        self.states += [0] * (layers - len(self.states))

        # 2. The modules, by a trial.
        cache = TreeCache(layers, 8, self)
        vocabulary = model.config.get_text_config().vocab_size
        tokens = torch.arange(TRIAL, device=model.device)[None] % vocabulary
        unknown = (
            f"{type(model).__name__} cannot be a target: its recurrent layers keep their state in a "
            "place that treespec does not know"
        )
        try:
            stores, calls = find_stores(decoder, tokens, cache)
        except (AttributeError, TypeError, ValueError) as error:  # a cache class of its own
            raise InputError(f"{unknown} ({first_line(error)})") from error
        self.has_attention = any(layer.is_initialized for layer in cache.tree_layers)
        if not stores and not self.has_attention:
            raise InputError(unknown)

        # 3. What each kind of module can do.
        kinds: dict[type, Mixer] = {}
        for module, store in stores.items():
            kind = type(module)
            if kind not in kinds:
                kinds[kind] = tried(Mixer(module, store), cache, calls[module])
            self.mixers.append(replace(kinds[kind], module=module, store=store))
        self.continues = all(mixer.continues for mixer in self.mixers)

    def new_states(self) -> RecurrentStates:
        """The states of one empty text."""
        return RecurrentStates(self.mixers)

    def layers(self, capacity: int) -> list[TreeLayer]:
        """The layers of a cache."""
        return [
            StateLayer(capacity, number) if number else TreeLayer(capacity)
            for number in self.states
        ]

    def all_masks(self, masks: Masks) -> Any:
        """Masks by layer type also under the names that models of mixed layers look up."""
        if not isinstance(masks, dict):
            return masks
        names: dict[str, Any] = {"linear_attention": None, "conv": None}
        for kind, name in (("hybrid", "full_attention"), ("hybrid_sliding", "sliding_attention")):
            if kind in masks:
                names[name] = masks[kind]
        return names | masks

    @contextmanager
    def running(self, cache: TreeCache, places: Tensor, seen: Tensor) -> Iterator[None]:
        """Inside, a forward of the decoder takes trees behind the cache.

        places: [B, T] int64, positions of all columns. seen: [B, N, T] bool.
        """
        rows = path_rows(seen[:, :, cache.end :], places[:, cache.end :])
        forwards = {}
        for number, mixer in enumerate(self.mixers):
            code = mixer.module.forward
            forwards[mixer.module] = partial(self._mixed, number, code, cache, rows)
        with replaced(forwards):
            yield

    def _mixed(
        self, number: int, code: Any, cache: TreeCache, rows: PathRows, *args: Any, **kwargs: Any
    ) -> Any:
        """A mixer's forward over trees: its inputs are [B, N, ...], and its outputs."""
        # 1. Its inputs at all uncommitted columns.
        mixer, states = self.mixers[number], cache.states
        assert states
        arguments: Arguments = arguments_of(mixer.module, args, kwargs)
        b, n = rows.outputs.shape
        constant, steps = split(arguments, b, n)
        earlier = rows.width - n
        if earlier:
            held = states.forwarded[number].steps
            steps = {
                name: torch.cat([held[name][:, :earlier], new], 1) for name, new in steps.items()
            }

        # 2. Its own code over the paths.
        texts = rows.texts.tolist()
        lent = chosen(states.of(number, constant), texts)
        by_path = {name: rows.spread(values) for name, values in steps.items()}
        with once_a_node(mixer.module, rows) as known:
            outputs, returned, after = run(mixer, code, cache, constant, by_path, lent)

        # 3. Keep the inputs for `commit`; each node's own output.
        left = after if rows.whole else None
        states.forwarded[number] = Forwarded(constant, steps, left, known)
        own = {place: rows.gathered(output) for place, output in outputs.items()}
        return answered(returned, own, arguments.get("state"))


@torch.no_grad()
def tried(mixer: Mixer, cache: TreeCache, arguments: Arguments) -> Mixer:
    """The mixer with what its code can do, by trial behind made-up states.

    arguments: of a call with TRIAL tokens.
    """
    # 1. States of two rows, as large as outputs, so that code which ignores them shows.
    constant, steps = split(arguments, 1, TRIAL)
    code, fresh = mixer.module.forward, mixer.store.fresh(constant)
    before = run(mixer, code, cache, constant, steps, chosen(fresh, [0]))[2]
    generator = torch.Generator().manual_seed(0)
    states: list[State] = []
    for state in before:
        if state is None or not state.is_floating_point():
            states.append(state if state is None else torch.cat([state, state]))
            continue
        noise = 0.5 + torch.rand(2, *state.shape[1:], generator=generator)
        states.append(noise.to(state))

    # 2. Several tokens at once as token by token, and rows together as one by one.
    def same(length: int, rows: Sequence[int], one: Mixer, other: Mixer) -> bool:
        some = {
            name: values[:, :length].repeat(len(rows), *(1,) * (values.ndim - 1))
            for name, values in steps.items()
        }
        results: list[Tensor] = []
        for way in (one, other):
            try:
                outputs = run(way, code, cache, constant, some, chosen(states, rows))[0]
                parts = [output.float().flatten() for output in outputs.values()]
                results.append(torch.cat(parts))
            except Exception:  # a model's own code may raise anything
                return False
        if len(results[0]) != len(results[1]):
            return False
        return bool((results[0] - results[1]).abs().mean() <= 0.02 * results[1].std())

    single = replace(mixer, continues=False, batches=False)
    batches = same(1, (0, 1), replace(single, batches=True), single)
    at_once = replace(single, continues=True)
    chunks = "kwargs" in parameters_of(mixer.module) and same(
        3, (0,), replace(at_once, chunks=True), single
    )
    return replace(mixer, continues=same(3, (0,), at_once, single), batches=batches, chunks=chunks)
