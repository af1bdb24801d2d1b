"""Forwards as CUDA graphs: the host starts all operations of a forward at once.

A forward over a few nodes of an 8 B model is about a thousand operations. A GPU needs a few
milliseconds for them, the host several times that to start them one by one. A graph repeats operations
that were recorded once, on the same addresses and shapes. So a forward that a graph can repeat

- reads its inputs from static tensors, into which each call copies its inputs;
- writes keys and values at columns that are an input, too;
- attends to all columns of the storage, under a mask. Two nodes after three tokens, in a graph
  of four rows over a storage of eight columns; rows 2 and 3 are padding:

      columns      | a b c | 0 1 | . . . |
      row 0        | x x x | x . | . . . |
      row 1        | x x x | x x | . . . |

- has the batch size that it was recorded for. Graphs are recorded for power-of-two batches; unused rows of the
  storage repeat sequence 0.

A forward that came too rarely to be recorded takes a graph of more texts or rows if there is one.
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
More = tuple[str, ...]  # what a graph may have more of than a forward: "texts", "rows"
Key = tuple[tuple[int, ...], int, int, int, More, Any]  # block, texts, rows, written columns
Recorded = tuple[Callable[[], None], Outputs, Sequence[Tensor]]

RECORD_AFTER_CALLS = (
    8  # calls over one storage before a forward is recorded: recording costs about ten forwards
)
# graphs, and forwards whose calls are counted; the oldest go
MAX_GRAPHS = 24
MAX_COUNTED_FORWARDS = 1000
MAX_GRAPH_ROWS = 256  # rows of a forward: with more, the host is as fast as the device
# Shapes are fixed, so cuDNN, which makes a plan for each shape, is fastest.
GRAPH_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
GRAPH_BACKENDS += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GRAPH_TOLERANCE = (
    0.1  # mean difference of a graph's outputs from the model's, over their standard deviation
)


@final
class Graph:
    """A recorded forward of B texts over the first B rows of some layers' blocks.

    Attributes:
        repeat: repeats the recorded operations.
        outputs: tensors that `repeat` writes.
        read: tensors that it reads.
        is_proven: whether its outputs were compared with the model's.
        length: of the first layer when the graph was made.
        given: static input tensors by name.
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
        # An id of an earlier tensor can be reused, so the tensors themselves are compared.
        tensors = [x for layer in layers for x in layer.allocation]
        return all(block() is x for block, x in zip(self.blocks, tensors, strict=True))

    def take(
        self, layers: Sequence[TreeLayer], inputs: Inputs, masks: Masks, rows: int, written: int
    ) -> None:
        """Copy a forward's inputs, write columns and masks into the static tensors.

        Args:
            layers: that the forward writes to.
            inputs: `tokens` [B, N], and others [B, ...].
            masks: [B, 1, N, T], with the window of their layers.
            rows: N of the graph, at least that of the inputs.
            written: columns that the forward writes.
        """
        batch, nodes = inputs["tokens"].shape
        for name, x in inputs.items():
            shape = (rows, *x.shape[2:]) if rows > nodes else x.shape[1:]
            static = self.get_static_tensor(name, x, (self.texts, *shape))
            (static[:batch, :nodes] if rows > nodes else static[:batch]).copy_(x)
        layer_of_window = {layer.window: layer for layer in layers}
        for window, layer in layer_of_window.items():
            write_columns = self.get_static_tensor(
                f"columns {window}", inputs["tokens"], (written,)
            )
            torch.arange(layer.length, layer.length + written, out=write_columns)
        for name, (window, mask) in masks.items():
            first = layer_of_window[window].first
            columns = mask.shape[3]
            static = self.get_static_tensor(
                name, mask, (self.texts, 1, rows, layer_of_window[window].capacity)
            )
            static.fill_(False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
            static[:batch, :, :nodes, first : first + columns] = mask
        for name in (*inputs, *masks) if batch < self.texts else ():
            self.given[name][batch:] = self.given[name][:1]

    def get_static_tensor(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the static tensor of that name; it is made at the first call."""
        if name not in self.given:
            with torch.inference_mode(mode=False):  # a tensor for any mode
                self.given[name] = like.new_zeros(shape)
        return self.given[name]

    def run(self, layers: Sequence[TreeLayer], run: Run) -> Outputs:
        """Run the forward without a graph, on the static tensors."""
        storages = [layer.storage for layer in layers]
        try:
            for layer in layers:
                layer.columns = self.given[f"columns {layer.window}"]
                layer.storage = tuple(x[: self.texts] for x in layer.allocation)
            with sdpa_kernel(GRAPH_BACKENDS):
                return run(self.given)
        finally:
            for layer, storage in zip(layers, storages, strict=True):
                layer.columns = None
                layer.storage = storage


@final
class Graphs:
    """The recorded forwards of a model.

    Each graph is compared once with the model, after another number of tokens than it was recorded with. If a
    graph cannot repeat the model, the model runs without graphs, and a warning says so.
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
        variant: tuple[int, int, More, Any],
    ) -> Outputs:
        """Run a forward, by a graph if it comes often.

        Args:
            layers: cache layers that the forward writes to.
            run: the forward, of inputs and masks by name.
            inputs: `tokens` [B, N], and others [B, ...].
            masks: [B, 1, N, T], with the window of their layers.
            variant: the number of rows; the number of columns that the forward writes; what a graph may have more
                of; and any other settings that the forward depends on. With "texts" all outputs are [B, ...]. With
                "rows" all inputs and outputs are [B, N, ...], and the forward writes N columns.

        Returns: the forward's outputs, valid until the next call.
        """
        # 1. Find a graph over this storage, or run the model if the forward is rare.
        (rows, written, growable, settings) = variant
        (batch, nodes) = inputs["tokens"].shape
        run_plain = partial(run, {**inputs, **{name: mask for name, (_, mask) in masks.items()}})
        if self.is_broken or rows > MAX_GRAPH_ROWS or not all(layer.storage for layer in layers):
            return run_plain()
        rows, written = (
            (1 << (nodes - 1).bit_length(),) * 2 if "rows" in growable else (rows, written)
        )
        for layer in layers:
            layer.reserve(layer.length + written)
        texts = (
            min(1 << (batch - 1).bit_length(), len(layers[0].allocation[0]))
            if "texts" in growable
            else batch
        )
        key = (tuple(map(id, layers[0].allocation)), texts, rows, written, growable, settings)
        graph = self.graphs.get(key)
        if graph is None or not graph.fits(layers):
            self.met = Counter() if len(self.met) > MAX_COUNTED_FORWARDS else self.met
            self.met[key] += 1
            if self.met[key] >= RECORD_AFTER_CALLS:
                graph = Graph(layers, texts)
            elif (larger := self.find_larger(key, layers)) is None:
                return run_plain()
            else:
                key = larger
                graph = self.graphs[larger]
                _, texts, rows, written, *_ = key

        # 2. Copy its inputs; record a new graph.
        graph.take(layers, inputs, masks, rows, written)
        if not graph.outputs:
            try:
                graph.repeat, graph.outputs, read = self.record(partial(graph.run, layers, run))
            except Exception as error:  # such as an operation that waits for the device
                self.disable(get_first_line(error))
                return run_plain()
            del self.met[key]
            stored = {x.data_ptr() for layer in layers for x in layer.allocation}
            graph.read = [x for x in read if x.data_ptr() not in stored]
            self.graphs = dict([*self.graphs.items()][-MAX_GRAPHS:]) | {key: graph}

        # 3. Repeat it. For the comparison the model runs before the graph, because all graphs share memory.
        plain_outputs: Outputs = ()
        if not graph.is_proven and layers[0].length != graph.length:
            graph.is_proven, plain_outputs = True, run_plain()
        graph.repeat()
        outputs = tuple(x[:batch] for x in graph.outputs) if texts > batch else graph.outputs
        outputs = tuple(x[:, :nodes] for x in outputs) if rows > nodes else outputs
        for output, expected in zip(outputs, plain_outputs, strict=False):
            difference = output - expected if expected.is_floating_point() else None
            if (
                difference is not None
                and not difference.abs().mean() <= GRAPH_TOLERANCE * expected.std()
            ):
                self.disable("its outputs are not the model's")
                return plain_outputs
        return outputs

    def find_larger(self, key: Key, layers: Sequence[TreeLayer]) -> Key | None:
        """Find the smallest recorded graph of more texts or rows that fits. key: of a forward without a graph."""
        block, texts, rows, written, growable, settings = key
        room = min(layer.capacity - layer.length for layer in layers)
        candidates = []
        for candidate, graph in self.graphs.items():
            is_alike = (candidate[0], *candidate[4:]) == (block, growable, settings) and graph.fits(
                layers
            )
            has_texts = candidate[1] == texts or (candidate[1] > texts and "texts" in growable)
            has_rows = candidate[2:4] == (rows, written) or (
                candidate[2] > rows and "rows" in growable
            )
            candidates += (
                [candidate] if is_alike and has_texts and has_rows and candidate[3] <= room else []
            )
        return min(candidates, key=lambda candidate: candidate[1] * candidate[2], default=None)

    def disable(self, why: str) -> None:
        self.is_broken = True
        self.graphs = {}
        log.warning("%s runs without CUDA graphs: %s", self.name, why)


def build_graphs(target: Any) -> Graphs | None:
    """Build graphs for a target that has only attention layers and lies on one CUDA device; None for others."""
    devices = {weight.device for weight in target.model.parameters()}
    is_fit = devices == {target.device} and target.device.type == "cuda" and not target.recurrent
    return (
        Graphs(type(target.model).__name__)
        if is_fit and "position_ids" in target.forward_arguments
        else None
    )


@final
class InputTracer(TorchDispatchMode):
    """Collects the tensors that operations read but did not create: a graph holds their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.made = set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = collect_tensors((args, kwargs))
        self.read |= {address: x for address, x in tensors.items() if address not in self.made}
        out = function(*args, **(kwargs or {}))
        self.made |= collect_tensors(out).keys() - self.read.keys()
        return out


def collect_tensors(values: Any) -> dict[int, Tensor]:
    """Return {address of storage: tensor} of all tensors in nested values."""
    tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr(): x for x in tensors}


class Recorder:
    """Records operations as a CUDA graph. All graphs of a model share memory, so only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> Recorded:
        """Record `run`. Returns a function that repeats it, the outputs it writes, and the tensors it reads."""
        # 1. Run twice on another stream, so that libraries initialise and constants are created.
        stream = torch.cuda.current_stream()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            run()
            with InputTracer() as reading:
                run()
        stream.wait_stream(side_stream)

        # 2. Record. Other threads may go on. A failed recording leaves torch's generator in capture mode: reset it.
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[stream.device_index]
        generator_state = generator.clone_state()
        try:
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                outputs = run()
        except RuntimeError:
            generator.graphsafe_set_state(generator_state)
            raise
        return graph.replay, outputs, [*reading.read.values()]
