"""Targets with layers that carry a state from token to token: Mamba, delta nets, short convolutions.

Attention layers of such a model take trees by their masks, as in any model. A recurrent layer takes a
tree as a batch of its paths (`recurrent.rows`), each after the state of its sequence. The layer's own
code computes both. A forward leaves the states alone and keeps the layers' inputs at each uncommitted
column. `commit` runs each layer once more over the inputs of the accepted nodes, unless the forward
has left the state after the last of them. Five drafted nodes, of which the path 0 2 is accepted:

    states after     forward: inputs of      commit([[0, 2]])
    a b c            0 1 2 3 4               layers over 0 2: states after a b c 0 2
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import DynamicCache, PreTrainedModel

from treespec.errors import InputError, first_line
from treespec.model.cache import State, States, TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.masks import Masks
from treespec.model.placement import device_of
from treespec.model.recurrent.mixer import (
    KINDS,
    TRIAL,
    Arguments,
    Mixer,
    StateLayer,
    Trail,
    arguments_of,
    is_by_token,
    split,
    tried,
)
from treespec.model.recurrent.rows import (
    Outputs,
    PathRows,
    entries,
    once_a_node,
    path_rows,
    read_back,
    replaced,
)

HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


@final
@dataclass(frozen=True)
class Forwarded:
    """Kept from the last forward of a mixer.

    steps: its inputs at the U uncommitted columns, [B, U, ...] by argument. constant: its other
    arguments. known: outputs of its linear layers.
    """

    rows: PathRows
    constant: Arguments
    steps: dict[str, Tensor]
    known: Outputs
    trail: Trail


@final
class Recurrent:
    """The mixers of a target.

    state_counts: pairs of a conv state and a recurrent state in each layer of a cache.
    indexed: whether the layers that carry no state are of indexed attention.
    has_attention: whether any layer keeps keys and values.
    continues: whether all mixers take several tokens after an earlier state.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, decoder: nn.Module, layers: int) -> None:
        """Raises InputError where no module's state is found."""
        # 1. The layers of a cache, as transformers' own has them.
        config = model.config.get_text_config()
        known = DynamicCache(config=config).layers
        self.indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
        self.state_counts = [getattr(layer, "number_of_states", 0) for layer in known]
        self.state_counts += [0] * (layers - len(self.state_counts))

        # 2. The modules, by a trial.
        cache = TreeCache(layers, 8, self)
        tokens = torch.arange(TRIAL, device=device_of(model))[None] % config.vocab_size
        unknown = (
            f"{type(model).__name__} cannot be a target: its recurrent layers keep their state in a "
            "place that treespec does not know"
        )
        try:
            found, calls = find_mixers(decoder, tokens, cache)
        except (AttributeError, TypeError, ValueError) as error:  # a cache class of its own
            raise InputError(f"{unknown} ({first_line(error)})") from error
        self.has_attention = any(layer.storage for layer in cache.tree_layers)
        if not found and not self.has_attention:
            raise InputError(unknown)

        # 3. What each kind of module can do.
        kinds = {type(mixer.module): mixer for mixer in found}
        kinds = {kind: tried(mixer, cache, calls[mixer.module]) for kind, mixer in kinds.items()}
        able = ((mixer, kinds[type(mixer.module)]) for mixer in found)
        self.mixers = [replace(m, continues=a.continues, chunks=a.chunks) for m, a in able]
        self.continues = all(mixer.continues for mixer in self.mixers)

    def layers(self, capacity: int) -> list[TreeLayer]:
        """The layers of a cache."""
        counts = self.state_counts
        return [StateLayer(capacity, n) if n else TreeLayer(capacity) for n in counts]

    def all_masks(self, masks: Masks) -> Any:
        """Masks by layer type also under the names that models of mixed layers look up."""
        by_type: Any = {"indexed_attention": masks} if self.indexed else masks
        if not isinstance(by_type, dict):
            return by_type
        names = {HYBRID[kind]: mask for kind, mask in by_type.items() if kind in HYBRID}
        return {"linear_attention": None, "conv": None} | names | by_type

    @contextmanager
    def running(self, cache: TreeCache, places: Tensor, seen: Tensor) -> Iterator[None]:
        """Inside, a forward of the decoder takes trees after the cache.

        places: [B, T] int64, positions of all columns. seen: [B, N, U] bool, of the uncommitted ones.
        """
        rows = path_rows(seen, places[:, cache.end :])
        numbered = enumerate(self.mixers)
        with replaced({m.module: partial(self._mixed, i, cache, rows) for i, m in numbered}):
            yield

    def _mixed(
        self, number: int, cache: TreeCache, rows: PathRows, *args: Any, **kwargs: Any
    ) -> Any:
        """A mixer's forward over trees: its inputs are [B, N, ...], and its outputs."""
        # 1. Its inputs at all uncommitted columns.
        mixer = self.mixers[number]
        (b, n) = rows.outputs.shape
        constant, steps = split(arguments_of(mixer.module, args, kwargs), b, n)
        earlier = rows.width - n
        if earlier:
            held = cache.forwarded[number].steps
            steps = {name: torch.cat([held[name][:, :earlier], steps[name]], 1) for name in steps}

        # 2. Its own code over the paths.
        state = state_in(cache, number, rows.sequences.tolist())
        by_path = {name: rows.spread(values) for name, values in steps.items()}
        with once_a_node(mixer.module, rows) as known:
            returned, trail = mixer.run(cache, constant, by_path, state)

        # 3. Keep what `commit` needs; each node's own output.
        cache.forwarded[number] = Forwarded(rows, constant, steps, known, trail)

        def own(part: Any) -> Any:
            return rows.gathered(part) if is_by_token(part, *rows.columns.shape) else part

        return tree_map(own, returned)

    @torch.no_grad()
    def committed(self, cache: TreeCache, nodes: Sequence[Sequence[int]]) -> list[States]:
        """The states of each sequence after its accepted nodes of the last forward."""
        # 1. The row and step of each one's last accepted node; it may be of an earlier forward.
        rows = cache.forwarded[0].rows
        earlier = rows.width - rows.outputs.shape[1]
        outputs = rows.outputs.tolist()
        ends = {sequence: (0, -1) for sequence, kept in enumerate(nodes) if kept}
        for sequence in ends:
            node = nodes[sequence][-1] - earlier
            if node >= 0:
                ends[sequence] = divmod(outputs[sequence][node], rows.columns.shape[1])

        # 2. Its states: those that the forward left, else by the mixer over the accepted nodes.
        new: list[States] = [[] if kept else cache.states[i] for i, kept in enumerate(nodes)]
        for number, mixer in enumerate(self.mixers):
            forwarded = cache.forwarded[number]
            again: defaultdict[int, list[int]] = defaultdict(list)  # sequences by number of nodes
            for sequence, (row, step) in ends.items():
                if step in forwarded.trail:
                    new[sequence].append(row_of(forwarded.trail[step], row))
                else:
                    again[len(nodes[sequence])].append(sequence)
            for length, sequences in again.items():
                kept = torch.tensor(sequences), torch.tensor([list(nodes[i]) for i in sequences])
                steps = {name: entries(values, *kept) for name, values in forwarded.steps.items()}
                state = state_in(cache, number, sequences)
                with read_back(mixer.module, forwarded.known, *kept):
                    trail = mixer.run(cache, forwarded.constant, steps, state)[1]
                for row, sequence in enumerate(sequences):
                    new[sequence].append(row_of(trail[length - 1], row))
        return new


def state_in(cache: TreeCache, number: int, sequences: Sequence[int]) -> State:
    """Copies of a mixer's states of some sequences, [sequences, ...]; zeros before the first token."""
    held = [cache.states[i][number] if cache.states[i] else None for i in sequences]
    zeros = {key: torch.zeros_like(x) for key, x in next(filter(None, held), {}).items()}
    return {key: torch.cat([(state or zeros)[key] for state in held]) for key in zeros}


def row_of(state: State, row: int) -> State:
    """The states [1, ...] of a row, which do not keep those of the others."""
    return {key: x if len(x) == 1 else x[row : row + 1].clone() for key, x in state.items()}


def find_mixers(
    decoder: nn.Module, tokens: Tensor, cache: TreeCache
) -> tuple[list[Mixer], dict[nn.Module, Arguments]]:
    """The modules of a decoder that carry a state, and all modules' arguments in a trial forward.

    tokens: [1, T] int64, of the trial. cache: an empty one, which the trial fills.
    Raises InputError for a module that keeps states in several layers of the cache.
    """
    stack: list[nn.Module] = []  # the modules at work
    calls: dict[nn.Module, Arguments] = {}
    touched: defaultdict[nn.Module, set[tuple[int, int]]] = defaultdict(set)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        stack.append(module)
        calls[module] = arguments_of(module, args, kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack.pop()

    def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        touched[stack[-1]].add((given["layer_idx"], given.get("state_idx", 0)))
        return original(*args, **kwargs)

    # 1. A forward: who is at work when the cache takes a state?
    with ExitStack() as listening:
        for module in decoder.modules():
            listening.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            listening.enter_context(module.register_forward_hook(end, always_call=True))
        for name in (f"update_{kind}_state" for kind in KINDS):
            setattr(cache, name, partial(noted, getattr(cache, name)))
            listening.callback(delattr, cache, name)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        options = {"past_key_values": cache, "cache_params": cache, "position_ids": positions}
        takes = inspect.signature(type(decoder).forward).parameters
        taken = {name: value for name, value in options.items() if name in takes}
        decoder(input_ids=tokens, use_cache=True, **taken)

    # 2. In which layer does each keep its states?
    mixers: list[Mixer] = []
    for module, places in touched.items():
        layers, numbers = (sorted(set(part)) for part in zip(*places, strict=True))
        if len(layers) > 1:
            raise InputError(f"{type(module).__name__} carries the states of several layers")
        mixers.append(Mixer(module, module.forward, layers[0], tuple(numbers)))
    return mixers, calls
