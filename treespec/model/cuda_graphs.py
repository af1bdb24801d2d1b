"""Forwards as CUDA graphs: the host starts all operations of a forward at once.

A forward over a few nodes of an 8 B model is about a thousand operations. A GPU needs a few
milliseconds for them, the host several times that to start them one by one. A graph repeats operations
that were recorded once, on the same addresses and shapes. So a forward that it can repeat

- reads its inputs from tensors that stay, into which each call copies its own;
- writes keys and values at columns that are an input, too;
- attends to all columns that the storage has, under a mask. Two nodes behind three tokens, in a graph
  of four rows over a storage of eight columns; nobody reads rows 2 and 3:

      columns      | a b c | 0 1 | . . . |
      row 0        | x x x | x . | . . . |
      row 1        | x x x | x x | . . . |

- has as many texts as it was recorded for. A storage has rows for more than it holds: a graph for a
  power of two of them serves fewer, and the rest repeat the first text into rows that are nobody's.

A forward that came too rarely for a graph of its own takes one of more texts or rows where there is one.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treespec.errors import get_first_line
from treespec.model.cache_layer import TreeLayer

log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]
Masks = Mapping[str, tuple[int | None, Tensor]]  # by name, with the window of their layers
Outputs = tuple[Tensor, ...]
Run = Callable[[Inputs], Outputs]
More = tuple[str, ...]  # of "texts" and "rows"
Key = tuple[tuple[int, ...], int, int, int, More, Any]  # block, texts, rows, written columns
Recorded = tuple[Callable[[], None], Outputs, Sequence[Tensor]]

RECORD_AFTER_CALLS = 8  # a forward is recorded when it comes so often over one storage: that costs about ten of its own
# graphs, and forwards whose times are counted; the oldest go
MAX_GRAPHS = 24
MAX_COUNTED_FORWARDS = 1000
MAX_GRAPH_ROWS = 256  # rows of a forward: beyond, the host is as fast as the device
# Of fixed shapes: cuDNN, which makes a plan for each, is fastest.
GRAPH_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
GRAPH_BACKENDS += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GRAPH_TOLERANCE = (
    0.1  # mean difference of a graph's outputs from the model's, in parts of their spread
)


@final
class Graph:
    """A recorded forward of B texts over the first B rows of some layers' blocks.

    length: of the first layer when it was made. outputs: what `repeat` writes. read: what it reads.
    """

    repeat: Callable[[], None]
    outputs: Outputs = ()
    read: Sequence[Tensor] = ()
    is_proven = False

    def __init__(self, layers: Sequence[TreeLayer], texts: int) -> None:
        self.blocks = [ref(x) for layer in layers for x in layer.allocation]
        self.texts = texts
        self.length, self.given = layers[0].length, dict[str, Tensor]()

    def fits(self, layers: Sequence[TreeLayer]) -> bool:
        """Whether the layers still have the storage that the graph writes to."""
        now = [x for layer in layers for x in layer.allocation]
        return all(known() is x for known, x in zip(self.blocks, now, strict=True))

    def take(
        self, layers: Sequence[TreeLayer], inputs: Inputs, masks: Masks, rows: int, written: int
    ) -> None:
        """Copy what a forward reads: inputs, the columns to write, and masks of all columns."""
        b, n = inputs["tokens"].shape
        for name, x in inputs.items():
            shape = (rows, *x.shape[2:]) if rows > n else x.shape[1:]
            own = self.get_static_tensor(name, x, (self.texts, *shape))
            (own[:b, :n] if rows > n else own[:b]).copy_(x)
        of = {layer.window: layer for layer in layers}
        for window, layer in of.items():
            numbers = self.get_static_tensor(f"columns {window}", inputs["tokens"], (written,))
            torch.arange(layer.length, layer.length + written, out=numbers)
        for name, (window, mask) in masks.items():
            first = of[window].first
            t = mask.shape[3]
            own = self.get_static_tensor(name, mask, (self.texts, 1, rows, of[window].capacity))
            own.fill_(False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
            own[:b, :, :n, first : first + t] = mask
        for name in (*inputs, *masks) if b < self.texts else ():
            self.given[name][b:] = self.given[name][:1]

    def get_static_tensor(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of that name which the graph reads."""
        if name not in self.given:
            with torch.inference_mode(mode=False):  # a tensor for any mode
                self.given[name] = like.new_zeros(shape)
        return self.given[name]

    def run(self, layers: Sequence[TreeLayer], run: Run) -> Outputs:
        """The forward without a graph, on what the graph reads."""
        held = [layer.storage for layer in layers]
        try:
            for layer in layers:
                layer.columns = self.given[f"columns {layer.window}"]
                layer.storage = tuple(x[: self.texts] for x in layer.allocation)
            with sdpa_kernel(GRAPH_BACKENDS):
                return run(self.given)
        finally:
            for layer, storage in zip(layers, held, strict=True):
                layer.columns = None
                layer.storage = storage


@final
class Graphs:
    """The recorded forwards of a model.

    Each is compared once with the model, behind another number of tokens than it was recorded with. A
    model that a graph cannot repeat goes on without, and a line says so.
    """

    def __init__(self, name: str) -> None:
        """name: of the model."""
        self.name, self.record, self.is_broken = name, Recorder(), False
        self.met = Counter[Any]()
        self.graphs: dict[Key, Graph] = {}

    def __call__(
        self,
        layers: Sequence[TreeLayer],
        run: Run,
        inputs: Inputs,
        masks: Masks,
        how: tuple[int, int, More, Any],
    ) -> Outputs:
        """The outputs of a forward that writes to these layers, valid until the next call.

        run: the forward, of inputs and masks. inputs: `tokens` [B, N], and others [B, ...]. masks: [B, 1, N, T].
        how: its rows, the columns that it writes, what a graph may have more of, and what else it
        depends on. Where that is texts, all outputs are [B, ...]; where it is rows, all inputs and
        outputs are [B, N, ...], and it writes N columns.
        """
        # 1. A graph over this storage; the model itself where none would be used again.
        (rows, written, more, of) = how
        (b, n) = inputs["tokens"].shape
        plain = partial(run, {**inputs, **{name: mask for name, (_, mask) in masks.items()}})
        if self.is_broken or rows > MAX_GRAPH_ROWS or not all(layer.storage for layer in layers):
            return plain()
        rows, written = (1 << (n - 1).bit_length(),) * 2 if "rows" in more else (rows, written)
        for layer in layers:
            layer.reserve(layer.length + written)
        texts = (
            min(1 << (b - 1).bit_length(), len(layers[0].allocation[0])) if "texts" in more else b
        )
        key = (tuple(map(id, layers[0].allocation)), texts, rows, written, more, of)
        graph = self.graphs.get(key)
        if graph is None or not graph.fits(layers):
            self.met = Counter() if len(self.met) > MAX_COUNTED_FORWARDS else self.met
            self.met[key] += 1
            if self.met[key] >= RECORD_AFTER_CALLS:
                graph = Graph(layers, texts)
            elif (larger := self.find_larger(key, layers)) is None:
                return plain()
            else:
                key = larger
                graph = self.graphs[larger]
                _, texts, rows, written, *_ = key

        # 2. What it reads; a new one is recorded.
        graph.take(layers, inputs, masks, rows, written)
        if not graph.outputs:
            try:
                graph.repeat, graph.outputs, read = self.record(partial(graph.run, layers, run))
            except Exception as error:  # an operation that waits for the device, for one
                self.disable(get_first_line(error))
                return plain()
            del self.met[key]
            stored = {x.data_ptr() for layer in layers for x in layer.allocation}
            graph.read = [x for x in read if x.data_ptr() not in stored]
            self.graphs = dict([*self.graphs.items()][-MAX_GRAPHS:]) | {key: graph}

        # 3. Repeat it. Once the model runs first, for comparison: its own graphs share memory with this one.
        true: Outputs = ()
        if not graph.is_proven and layers[0].length != graph.length:
            graph.is_proven, true = True, plain()
        graph.repeat()
        outputs = tuple(x[:b] for x in graph.outputs) if texts > b else graph.outputs
        outputs = tuple(x[:, :n] for x in outputs) if rows > n else outputs
        for found, wanted in zip(outputs, true, strict=False):
            apart = found - wanted if wanted.is_floating_point() else None
            if apart is not None and not apart.abs().mean() <= GRAPH_TOLERANCE * wanted.std():
                self.disable("its outputs are not the model's")
                return true
        return outputs

    def find_larger(self, key: Key, layers: Sequence[TreeLayer]) -> Key | None:
        """The smallest graph of more texts or rows that does for now. key: of a forward that has none."""
        block, texts, rows, written, more, of = key
        room = min(layer.capacity - layer.length for layer in layers)
        able = []
        for other, graph in self.graphs.items():
            alike = (other[0], *other[4:]) == (block, more, of) and graph.fits(layers)
            many = other[1] == texts or (other[1] > texts and "texts" in more)
            wide = other[2:4] == (rows, written) or (other[2] > rows and "rows" in more)
            able += [other] if alike and many and wide and other[3] <= room else []
        return min(able, key=lambda other: other[1] * other[2], default=None)

    def disable(self, why: str) -> None:
        self.is_broken = True
        self.graphs = {}
        log.warning("%s runs without CUDA graphs: %s", self.name, why)


def build_graphs(target: Any) -> Graphs | None:
    """Graphs of a target's forwards, if it has attention layers alone and lies whole on a CUDA device."""
    devices = {weight.device for weight in target.model.parameters()}
    fit = devices == {target.device} and target.device.type == "cuda" and not target.recurrent
    return (
        Graphs(type(target.model).__name__)
        if fit and "position_ids" in target.forward_arguments
        else None
    )


@final
class InputTracer(TorchDispatchMode):
    """Collects the tensors that operations read and did not make: a graph has their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.made = set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = collect_tensors((args, kwargs))
        self.read |= {place: x for place, x in given.items() if place not in self.made}
        out = function(*args, **(kwargs or {}))
        self.made |= collect_tensors(out).keys() - self.read.keys()
        return out


def collect_tensors(values: Any) -> dict[int, Tensor]:
    """By the address of their storage."""
    tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr(): x for x in tensors}


class Recorder:
    """Records operations as a CUDA graph. All graphs of a model share memory: one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> Recorded:
        """What repeats the operations of `run`; its outputs, which the graph writes again; what it reads."""
        # 1. Run twice on another stream: libraries set themselves up, and constants are made.
        now = torch.cuda.current_stream()
        beside = torch.cuda.Stream()
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            run()
            with InputTracer() as reading:
                run()
        now.wait_stream(beside)

        # 2. Record. Other threads may go on. A recording that fails leaves torch's generator in its midst.
        graph = torch.cuda.CUDAGraph()
        random = torch.cuda.default_generators[now.device_index]
        before = random.clone_state()
        try:
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                outputs = run()
        except RuntimeError:
            random.graphsafe_set_state(before)
            raise
        return graph.replay, outputs, [*reading.read.values()]
