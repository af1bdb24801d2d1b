"""Targets with layers that carry a state from token to token: Mamba, delta nets, short convolutions.

Attention layers of such a model take trees by their masks, as in any model. A recurrent layer takes a
tree as a batch of its paths (`recurrent_rows`), each behind the state of its text
(`recurrent_states`). The layer's own code computes both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from treespec.errors import InputError, first_line
from treespec.model.cache import TreeCache, TreeLayer
from treespec.model.masks import Masks
from treespec.model.recurrent_mixers import (
    TRIAL,
    Mixer,
    StateLayer,
    arguments_of,
    find_mixers,
)
from treespec.model.recurrent_rows import PathRows, once_a_node, path_rows, replaced
from treespec.model.recurrent_run import Call, answered, split, tried
from treespec.model.recurrent_states import Forwarded, RecurrentStates, chosen


@final
class Recurrent:
    """The mixers of a target.

    state_counts: pairs of a conv state and a recurrent state in each layer of a cache.
    indexed: whether the layers that do not are of indexed attention.
    has_attention: whether any layer keeps keys and values.
    continues: whether all mixers take several tokens behind an earlier state.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, decoder: nn.Module, layers: int) -> None:
        """Raises InputError where no module's state is found."""
        # 1. The layers of a cache, as transformers' own has them.
        config = model.config.get_text_config()
        known = DynamicCache(config=config).layers
        self.indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
        self.mixers: list[Mixer] = []
        self.state_counts = [getattr(layer, "number_of_states", 0) for layer in known]
        self.state_counts += [0] * (layers - len(self.state_counts))

        # 2. The modules, by a trial.
        cache = TreeCache(layers, 8, self)
        tokens = torch.arange(TRIAL, device=model.device)[None] % config.vocab_size
        unknown = (
            f"{type(model).__name__} cannot be a target: its recurrent layers keep their state in a "
            "place that treespec does not know"
        )
        try:
            mixers, calls = find_mixers(decoder, tokens, cache)
        except (AttributeError, TypeError, ValueError) as error:  # a cache class of its own
            raise InputError(f"{unknown} ({first_line(error)})") from error
        self.has_attention = any(layer.is_initialized for layer in cache.tree_layers)
        if not mixers and not self.has_attention:
            raise InputError(unknown)

        # 3. What each kind of module can do.
        kinds: dict[type, Mixer] = {}
        for mixer in mixers:
            kind = type(mixer.module)
            if kind not in kinds:
                kinds[kind] = tried(mixer, cache, calls[mixer.module], TRIAL)
            able = kinds[kind]
            self.mixers.append(replace(mixer, continues=able.continues, chunks=able.chunks))
        self.continues = all(mixer.continues for mixer in self.mixers)

    def new_states(self) -> RecurrentStates:
        """The states of one empty text."""
        return RecurrentStates(self.mixers)

    def layers(self, capacity: int) -> list[TreeLayer]:
        """The layers of a cache."""
        return [
            StateLayer(capacity, number) if number else TreeLayer(capacity)
            for number in self.state_counts
        ]

    def all_masks(self, masks: Masks) -> Any:
        """Masks by layer type also under the names that models of mixed layers look up."""
        if self.indexed:
            return {"linear_attention": None, "conv": None, "indexed_attention": masks}
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
        assert isinstance(states, RecurrentStates)
        b, n = rows.outputs.shape
        constant, steps = split(arguments_of(mixer.module, args, kwargs), b, n)
        earlier = rows.width - n
        if earlier:
            held = states.forwarded[number].steps
            steps = {
                name: torch.cat([held[name][:, :earlier], new], 1) for name, new in steps.items()
            }

        # 2. Its own code over the paths.
        texts = rows.texts.tolist()
        lent = chosen(states.of(number), texts)
        by_path = {name: rows.spread(values) for name, values in steps.items()}
        with once_a_node(mixer.module, rows) as known:
            ran = Call(mixer, code, cache, constant, by_path).run(lent)

        # 3. Keep what `commit` needs; each node's own output.
        after = ran.states if rows.whole else []
        outputs = rows.outputs if ran.trail and not earlier else None
        states.forwarded[number] = Forwarded(constant, steps, after, known, ran.trail, outputs)
        own = {place: rows.gathered(output) for place, output in ran.outputs.items()}
        return answered(ran.returned, own)
