"""Targets with layers that carry a state from token to token: Mamba, delta nets, short convolutions.

Attention layers of such a model take trees by their masks, as in any model. A recurrent layer takes a
tree as a batch of its paths (`treespec.model.recurrent.rows`), each after the state of its sequence. The layer's
code computes both. A forward does not change the states, and keeps the layers' inputs at each uncommitted
column. `commit` runs each layer once more over the inputs of the accepted nodes, unless the forward
has kept the state after the last of them. Five drafted nodes; the path 0 2 is accepted:

    states after     forward: inputs of      commit([[0, 2]])
    a b c            0 1 2 3 4               layers over 0 2: states after a b c 0 2
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import DynamicCache, PreTrainedModel

from treespec.errors import InputError, get_first_line
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.cache_rows import State, States
from treespec.model.layer_types import INDEXED_ATTENTION, get_layer_types
from treespec.model.masks import Masks
from treespec.model.placement import find_device_of
from treespec.model.recurrent.mixer import (
    STATE_KINDS,
    TRIAL_FORWARD_TOKENS,
    Arguments,
    RecurrentLayer,
    StateLayer,
    Trail,
    bind_arguments,
    is_by_token,
    probe_mixer,
    split_arguments,
)
from treespec.model.recurrent.rows import (
    Outputs,
    PathRows,
    build_path_rows,
    gather_entries,
    once_a_node,
    read_back,
    replaced,
)

HYBRID_TYPES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


@final
@dataclass(frozen=True)
class Forwarded:
    """What `commit` needs of a mixer's last forward.

    Attributes:
        rows: of the forward.
        constant: arguments that do not differ by token.
        steps: {argument: [B, U, ...] at the U uncommitted columns}.
        known: outputs of its linear layers.
        trail: states after steps.
    """

    rows: PathRows
    constant: Arguments
    steps: dict[str, Tensor]
    known: Outputs
    trail: Trail


class PathStep(NamedTuple):
    """A step of a forward over paths: the row of `PathRows`, and the step in it; -1 before the first."""

    row: int
    step: int


def find_last_steps(rows: PathRows, nodes: Sequence[Sequence[int]]) -> dict[int, PathStep]:
    """Return {sequence: the step of its last accepted node}, for sequences with accepted nodes.

    A node of an earlier forward has step -1, before the first. In the drawing of
    `treespec.model.recurrent.rows`, node 4 is step 2 of row 1:

        row 0    0 1 3      nodes [[0, 2, 4]]: {0: (row 1, step 2)}
        row 1    0 2 4
    """
    earlier = rows.width - rows.outputs.shape[1]
    depth = rows.columns.shape[1]
    outputs = rows.outputs.tolist()
    steps = {}
    for sequence, accepted in enumerate(nodes):
        if not accepted:
            continue
        node = accepted[-1] - earlier
        if node >= 0:
            row, step = divmod(outputs[sequence][node], depth)
            steps[sequence] = PathStep(row, step)
        else:
            steps[sequence] = PathStep(0, -1)
    return steps


@final
class Recurrent:
    """The mixers of a target.

    Attributes:
        state_counts: by cache layer, pairs of a conv state and a recurrent state.
        indexed: whether the layers without a state are indexed attention.
        has_attention: whether any layer keeps keys and values.
        mixers: of the model.
        continues: whether all mixers take several tokens after an earlier state.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, decoder: nn.Module, layers: int) -> None:
        """Find the mixers of a model by a trial. Raises InputError if no module's state is found."""
        # 1. The layers of a cache, as in transformers' `DynamicCache`.
        config = model.config.get_text_config()
        cache_layers = DynamicCache(config=config).layers
        self.indexed = INDEXED_ATTENTION in get_layer_types(config)
        self.state_counts = [getattr(layer, "number_of_states", 0) for layer in cache_layers]
        self.state_counts += [0] * (layers - len(self.state_counts))

        # 2. The modules, by a trial.
        cache = TreeCache(layers, 8, self)
        tokens = (
            torch.arange(TRIAL_FORWARD_TOKENS, device=find_device_of(model))[None]
            % config.vocab_size
        )
        refusal = (
            f"{type(model).__name__} cannot be a target: its recurrent layers keep their state in a "
            "place that treespec does not know"
        )
        try:
            mixers = find_mixers(decoder, tokens, cache)
        except (
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # the model needs another cache class
            raise InputError(f"{refusal} ({get_first_line(error)})") from error
        self.has_attention = any(layer.storage for layer in cache.tree_layers)
        if not mixers and not self.has_attention:
            raise InputError(refusal)

        # 3. Probe one module of each class.
        trials = {type(trial.mixer.module): trial for trial in mixers}
        kinds = {}
        for kind, trial in trials.items():
            kinds[kind] = probe_mixer(trial.mixer, cache, trial.arguments)
        self.mixers = []
        for trial in mixers:
            probed = kinds[type(trial.mixer.module)]
            probed_mixer = replace(trial.mixer, continues=probed.continues, chunks=probed.chunks)
            self.mixers.append(probed_mixer)
        self.continues = all(mixer.continues for mixer in self.mixers)

    def build_layers(self, capacity: int) -> list[TreeLayer]:
        """Make the layers of a cache. capacity: columns to allocate."""
        layers: list[TreeLayer] = []
        for count in self.state_counts:
            if count:
                layers.append(StateLayer(capacity, count))
            else:
                layers.append(TreeLayer(capacity))
        return layers

    def build_all_masks(self, masks: Masks) -> Any:
        """Add the layer types under which models of mixed layers look up their masks."""
        by_type: Any = masks
        if self.indexed:
            by_type = {INDEXED_ATTENTION: masks}
        if not isinstance(by_type, dict):
            return by_type
        names = {HYBRID_TYPES[kind]: mask for kind, mask in by_type.items() if kind in HYBRID_TYPES}
        return {"linear_attention": None, "conv": None} | names | by_type

    @contextmanager
    def running(self, cache: TreeCache, places: Tensor, seen: Tensor) -> Iterator[None]:
        """Inside, a forward of the decoder takes trees after the cache.

        Args:
            cache: of the sequences.
            places: [B, T] int64, positions of all columns.
            seen: [B, N, U] bool, the uncommitted columns that each node sees.
        """
        rows = build_path_rows(seen, places[:, cache.end :])
        forwards = {}
        for number, mixer in enumerate(self.mixers):
            forwards[mixer.module] = partial(self._run_mixer, number, cache, rows)
        with replaced(forwards):
            yield

    def _run_mixer(
        self, number: int, cache: TreeCache, rows: PathRows, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a mixer over trees, with inputs and outputs [B, N, ...]. number: of the mixer."""
        # 1. Its inputs at all uncommitted columns.
        mixer = self.mixers[number]
        b, n = rows.outputs.shape
        constant, steps = split_arguments(bind_arguments(mixer.module, args, kwargs), b, n)
        earlier = rows.width - n
        if earlier:
            earlier_steps = cache.forwarded[number].steps
            for name in steps:
                steps[name] = torch.cat([earlier_steps[name][:, :earlier], steps[name]], 1)

        # 2. Its code over the paths.
        state = copy_states(cache, number, rows.sequences.tolist())
        by_path = {name: rows.spread(values) for name, values in steps.items()}
        with once_a_node(mixer.module, rows) as linear_outputs:
            returned, trail = mixer.run(cache, constant, by_path, state)

        # 3. Keep what `commit` needs; return each node's output.
        cache.forwarded[number] = Forwarded(rows, constant, steps, linear_outputs, trail)
        row_count, step_count = rows.columns.shape

        def gather(part: Any) -> Any:
            if is_by_token(part, row_count, step_count):
                return rows.gather_node_steps(part)
            return part

        return tree_map(gather, returned)

    @torch.no_grad()
    def compute_committed_states(
        self, cache: TreeCache, nodes: Sequence[Sequence[int]]
    ) -> list[States]:
        """Return, by sequence, the states after its accepted nodes of the last forward."""
        last_steps = find_last_steps(cache.forwarded[0].rows, nodes)
        new = cache.states
        for sequence in last_steps:
            new[sequence] = []
        for number in range(len(self.mixers)):
            for sequence, state in self._run_accepted(number, cache, nodes, last_steps).items():
                new[sequence].append(state)
        return new

    def _run_accepted(
        self,
        number: int,
        cache: TreeCache,
        nodes: Sequence[Sequence[int]],
        last_steps: dict[int, PathStep],
    ) -> dict[int, State]:
        """Return {sequence: a mixer's state after its accepted nodes}, from the forward's trail or by another run.

        Args:
            number: of the mixer.
            cache: of the sequences.
            nodes: by sequence, its accepted nodes.
            last_steps: from `find_last_steps`.
        """
        # 1. The forward has kept the state after some steps.
        mixer = self.mixers[number]
        forwarded = cache.forwarded[number]
        states: dict[int, State] = {}
        by_length: defaultdict[int, list[int]] = defaultdict(list)  # the other sequences
        for sequence, last in last_steps.items():
            if last.step in forwarded.trail:
                states[sequence] = select_state_row(forwarded.trail[last.step], last.row)
            else:
                by_length[len(nodes[sequence])].append(sequence)

        # 2. The mixer runs again over the accepted nodes; paths of equal length are batched.
        for length, sequences in by_length.items():
            numbers = torch.tensor(sequences, dtype=torch.int64, device="cpu")
            columns = torch.tensor(
                [list(nodes[sequence]) for sequence in sequences], dtype=torch.int64, device="cpu"
            )
            steps = {}
            for name, values in forwarded.steps.items():
                steps[name] = gather_entries(values, numbers, columns)
            before = copy_states(cache, number, sequences)
            with read_back(mixer.module, forwarded.known, numbers, columns):
                _, trail = mixer.run(cache, forwarded.constant, steps, before)
            for row, sequence in enumerate(sequences):
                states[sequence] = select_state_row(trail[length - 1], row)
        return states


def copy_states(cache: TreeCache, number: int, sequences: Sequence[int]) -> State:
    """Copy a mixer's states of some sequences, [sequences, ...]; zeros before the first token."""
    states = cache.states
    states_of_sequences: list[State] = []
    for sequence in sequences:
        if states[sequence]:
            states_of_sequences.append(states[sequence][number])
        else:
            states_of_sequences.append({})
    joined = {}
    for key, example in next(filter(None, states_of_sequences), {}).items():
        zeros = torch.zeros_like(example)
        joined[key] = torch.cat([state.get(key, zeros) for state in states_of_sequences])
    return joined


def select_state_row(state: State, row: int) -> State:
    """Copy the states [1, ...] of a row, so that the memory of other rows can be freed."""
    selected = {}
    for key, part in state.items():
        if len(part) > 1:
            part = part[row : row + 1].clone()
        selected[key] = part
    return selected


class MixerCall(NamedTuple):
    """A mixer, and the arguments of its module in the trial forward."""

    mixer: RecurrentLayer
    arguments: Arguments


def find_mixers(decoder: nn.Module, tokens: Tensor, cache: TreeCache) -> list[MixerCall]:
    """Find the modules of a decoder that carry a state, by a trial forward.

    Args:
        decoder: of the model.
        tokens: [1, T] int64, of the trial.
        cache: an empty cache, which the trial fills.

    Raises:
        InputError: a module keeps states in several layers of the cache.
    """
    active_modules: list[nn.Module] = []  # the innermost module last
    calls: dict[nn.Module, Arguments] = {}
    touched: defaultdict[nn.Module, set[tuple[int, int]]] = defaultdict(set)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        active_modules.append(module)
        calls[module] = bind_arguments(module, args, kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        active_modules.pop()

    def note(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        place = (arguments["layer_idx"], arguments.get("state_idx", 0))
        touched[active_modules[-1]].add(place)
        return original(*args, **kwargs)

    # 1. A forward: which module runs when the cache receives a state?
    with ExitStack() as listening:
        for module in decoder.modules():
            listening.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            listening.enter_context(module.register_forward_hook(end, always_call=True))
        for kind in STATE_KINDS:
            name = f"update_{kind}_state"
            setattr(cache, name, partial(note, getattr(cache, name)))
            listening.callback(delattr, cache, name)
        run_trial(decoder, tokens, cache)

    # 2. In which cache layer does each module keep its states?
    mixers = []
    for module, places in touched.items():
        layers = sorted({layer for layer, _ in places})
        numbers = sorted({number for _, number in places})
        if len(layers) > 1:
            raise InputError(f"{type(module).__name__} carries the states of several layers")
        mixer = RecurrentLayer(module, module.forward, layers[0], tuple(numbers))
        mixers.append(MixerCall(mixer, calls[module]))
    return mixers


def run_trial(decoder: nn.Module, tokens: Tensor, cache: TreeCache) -> None:
    """Forward tokens [1, T] with the arguments that a decoder accepts."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    options = {"past_key_values": cache, "cache_params": cache, "position_ids": positions}
    parameters = inspect.signature(type(decoder).forward).parameters
    arguments = {name: value for name, value in options.items() if name in parameters}
    decoder(input_ids=tokens, use_cache=True, **arguments)
