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
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from treespec.errors import get_first_line
from treespec.model.cache_layer import TreeLayer
from treespec.model.graph_keys import GraphKey, GraphVariant, build_key
from treespec.model.graph_recorder import Outputs, Recorder

log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]
Masks = Mapping[str, tuple[int | None, Tensor]]  # by name, with the window of their layers
Run = Callable[[Inputs], Outputs]

# Calls over one storage before a forward is recorded: recording costs about ten forwards.
RECORD_AFTER_CALLS = 8
# graphs, and forwards whose calls are counted; the oldest go
MAX_GRAPHS = 24
MAX_COUNTED_FORWARDS = 1000
MAX_GRAPH_ROWS = 256  # rows of a forward: with more, the host is as fast as the device
# Shapes are fixed, so cuDNN, which makes a plan for each shape, is fastest.
GRAPH_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
GRAPH_BACKENDS += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Mean difference of a graph's outputs from the model's, over their standard deviation.
GRAPH_TOLERANCE = 0.1


@final
class Graph:
    """A recorded forward of B texts over the first B rows of some layers' blocks.

    Attributes:
        repeat: repeats the recorded operations.
        outputs: tensors that `repeat` writes.
        read: tensors that it reads.
        is_proven: whether its outputs were compared with the model's.
        key: what it is recorded for.
        texts: B.
        length: of the first layer when the graph was made.
        given: static input tensors by name.
    """

    repeat: Callable[[], None]
    outputs: Outputs = ()
    read: Sequence[Tensor] = ()
    is_proven = False

    def __init__(self, layers: Sequence[TreeLayer], key: GraphKey) -> None:
        self.blocks = [ref(x) for layer in layers for x in layer.allocation]
        self.key = key
        self.texts = key.texts
        self.length = layers[0].length
        self.given: dict[str, Tensor] = {}

    def fits(self, layers: Sequence[TreeLayer]) -> bool:
        """Whether the layers still have the storage that the graph writes to."""
        # An id of an earlier tensor can be reused, so the tensors themselves are compared.
        tensors = [x for layer in layers for x in layer.allocation]
        return all(block() is x for block, x in zip(self.blocks, tensors, strict=True))

    def take(self, layers: Sequence[TreeLayer], inputs: Inputs, masks: Masks) -> None:
        """Copy a forward's inputs, write columns and masks into the static tensors.

        Args:
            layers: that the forward writes to.
            inputs: `tokens` [B, N], and others [B, ...].
            masks: [B, 1, N, T], with the window of their layers.
        """
        # 1. Inputs. With more rows than nodes, all of them are [B, N, ...].
        batch, nodes = inputs["tokens"].shape
        rows = self.key.rows
        for name, x in inputs.items():
            if rows > nodes:
                static = self.get_static_tensor(name, x, (self.texts, rows, *x.shape[2:]))
                static[:batch, :nodes].copy_(x)
            else:
                static = self.get_static_tensor(name, x, (self.texts, *x.shape[1:]))
                static[:batch].copy_(x)

        # 2. The columns that layers of each window write.
        layer_of_window = {layer.window: layer for layer in layers}
        written = self.key.written
        for window, layer in layer_of_window.items():
            name = f"columns {window}"
            write_columns = self.get_static_tensor(name, inputs["tokens"], (written,))
            torch.arange(layer.length, layer.length + written, out=write_columns)

        # 3. Masks over all columns of the storage.
        for name, (window, mask) in masks.items():
            layer = layer_of_window[window]
            end = layer.first + mask.shape[3]
            static = self.get_static_tensor(name, mask, (self.texts, 1, rows, layer.capacity))
            hidden: float = False
            if mask.dtype != torch.bool:
                hidden = torch.finfo(mask.dtype).min
            static.fill_(hidden)
            static[:batch, :, :nodes, layer.first : end] = mask

        # 4. Texts beyond the batch repeat the first one.
        if batch < self.texts:
            for name in (*inputs, *masks):
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
        self.name = name
        self.recorder = Recorder()
        self.is_broken = False
        self.calls = Counter[GraphKey]()  # of forwards without a graph of their own
        self.graphs: dict[GraphKey, Graph] = {}

    def __call__(
        self,
        layers: Sequence[TreeLayer],
        run: Run,
        inputs: Inputs,
        masks: Masks,
        variant: GraphVariant,
    ) -> Outputs:
        """Run a forward, by a graph if it comes often.

        Args:
            layers: cache layers that the forward writes to.
            run: the forward, of inputs and masks by name.
            inputs: `tokens` [B, N], and others [B, ...].
            masks: [B, 1, N, T], with the window of their layers.
            variant: what else the forward depends on.

        Returns: the forward's outputs, valid until the next call.
        """
        # 1. Find a graph over this storage, or run the model if the forward is rare.
        masks_by_name = {name: mask for name, (_, mask) in masks.items()}
        run_plain = partial(run, {**inputs, **masks_by_name})
        if self.is_broken or variant.rows > MAX_GRAPH_ROWS:
            return run_plain()
        if not all(layer.storage for layer in layers):
            return run_plain()
        batch, nodes = inputs["tokens"].shape
        graph = self.find(build_key(layers, batch, nodes, variant), layers)
        if graph is None:
            return run_plain()

        # 2. Copy the inputs; record a new graph; repeat it.
        graph.take(layers, inputs, masks)
        if not graph.outputs and not self.record(graph, layers, run):
            return run_plain()
        return self.replay(graph, layers, run_plain, batch, nodes)

    def find(self, key: GraphKey, layers: Sequence[TreeLayer]) -> Graph | None:
        """Find a graph for a forward: its own, a new one to record if it came often, or a larger one.

        None: the forward is rare, and no larger graph fits.
        """
        graph = self.graphs.get(key)
        if graph and graph.fits(layers):
            return graph
        if len(self.calls) > MAX_COUNTED_FORWARDS:
            self.calls = Counter()
        self.calls[key] += 1
        if self.calls[key] >= RECORD_AFTER_CALLS:
            return Graph(layers, key)
        return self.find_larger(key, layers)

    def find_larger(self, key: GraphKey, layers: Sequence[TreeLayer]) -> Graph | None:
        """Find the smallest recorded graph of more texts or rows that fits. key: of a forward without a graph."""
        room = min(layer.capacity - layer.length for layer in layers)
        best: Graph | None = None
        for other, graph in self.graphs.items():
            if not other.can_serve(key) or other.written > room or not graph.fits(layers):
                continue
            if best is None or other.texts * other.rows < best.key.texts * best.key.rows:
                best = graph
        return best

    def record(self, graph: Graph, layers: Sequence[TreeLayer], run: Run) -> bool:
        """Record a forward into a graph that has its inputs. Returns False if it cannot be recorded."""
        try:
            graph.repeat, graph.outputs, read = self.recorder(partial(graph.run, layers, run))
        except Exception as error:  # such as an operation that waits for the device
            self.disable(get_first_line(error))
            return False
        del self.calls[graph.key]
        stored = {x.data_ptr() for layer in layers for x in layer.allocation}
        graph.read = [x for x in read if x.data_ptr() not in stored]
        newest = list(self.graphs.items())[-MAX_GRAPHS:]
        self.graphs = dict(newest) | {graph.key: graph}
        return True

    def replay(
        self,
        graph: Graph,
        layers: Sequence[TreeLayer],
        run_plain: Callable[[], Outputs],
        batch: int,
        nodes: int,
    ) -> Outputs:
        """Repeat a graph that has its inputs; once, compare its outputs with the model's.

        batch, nodes: of the forward. Returns its outputs, or the model's if they differ.
        """
        # 1. For the comparison the model runs before the graph, because all graphs share memory.
        plain_outputs: Outputs = ()
        if not graph.is_proven and layers[0].length != graph.length:
            graph.is_proven = True
            plain_outputs = run_plain()

        # 2. The graph, without the outputs of padding.
        graph.repeat()
        outputs = graph.outputs
        if graph.texts > batch:
            outputs = tuple(x[:batch] for x in outputs)
        if graph.key.rows > nodes:
            outputs = tuple(x[:, :nodes] for x in outputs)

        # 3. The comparison.
        for output, expected in zip(outputs, plain_outputs, strict=False):
            if not is_close(output, expected):
                self.disable("its outputs are not the model's")
                return plain_outputs
        return outputs

    def disable(self, why: str) -> None:
        self.is_broken = True
        self.graphs = {}
        log.warning("%s runs without CUDA graphs: %s", self.name, why)


def is_close(output: Tensor, expected: Tensor) -> bool:
    """Whether a graph's output is the model's up to rounding; numbers of other kinds are not compared."""
    if not expected.is_floating_point():
        return True
    difference = (output - expected).abs().mean()
    return bool(difference <= GRAPH_TOLERANCE * expected.std())


def build_graphs(model: nn.Module, tree_decoder: Any) -> Graphs | None:
    """Build graphs for a model that has only attention layers and lies on one CUDA device; None for others.

    tree_decoder: the model's `treespec.model.tree_decoder.TreeDecoder`.
    """
    device = tree_decoder.device
    devices = {weight.device for weight in model.parameters()}
    if devices != {device} or device.type != "cuda" or tree_decoder.recurrent:
        return None
    if "position_ids" not in tree_decoder.forward_arguments:
        return None
    return Graphs(type(model).__name__)
