"""Trees as a batch of their paths, for layers whose state goes from token to token.

A recurrent layer cannot take a mask: it reads its tokens in order. But a node's state follows from
its parent's. So a tree goes through such a layer as one batch row for each leaf: the path from the
root to that leaf. The five-node example of `treespec.trees.mask`, after a sequence with state s:

      0
     / \\        row 0    s | 0 1 3      outputs of nodes 0 1 3: row 0, steps 0 1 2
    1   2       row 1    s | 0 2 4      outputs of nodes   2 4: row 1, steps   1 2
    |   |
    3   4

Each row starts from the state of its sequence. The output of a linear layer depends on nothing but the node.
So the layer computes each node once in a forward, and `commit` reuses these outputs:

    rows      0 1 3 | 0 2 4      linear layers over 0 1 2 3 4, spread to 0 1 3 | 0 2 4
    commit    0 2 4              their outputs for 0 2 4
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import final

import torch
from torch import Tensor, nn

# Nodes of a forward whose outputs are kept: more than a tree has, fewer than a prompt.
MAX_KEPT_NODES = 128
Linear = Callable[[Tensor], Tensor]
Call = tuple[nn.Module, int]  # a linear layer, and the number of its call in a forward
Outputs = dict[Call, Tensor]  # [B, N, out]


@final
@dataclass(frozen=True)
class PathRows:
    """The paths of the trees of B sequences with U uncommitted columns each; the last N are new.

    Attributes:
        width: U.
        sequences: [R] int64, the sequence of each row.
        columns: [R, L] int64, the uncommitted column of each step; padded with any column after the end of a path.
        outputs: [B, N] int64, the index of each new node among the R * L steps.
        whole: whether row b is sequence b with all its columns in order, as in a chain.
    """

    width: int
    sequences: Tensor
    columns: Tensor
    outputs: Tensor
    whole: bool

    def spread(self, nodes: Tensor) -> Tensor:
        """Gather [R, L, ...] from [B, U, ...]: the entry of each step's node."""
        if self.whole:
            return nodes
        return gather_entries(nodes, self.sequences, self.columns)

    def gather_node_steps(self, steps: Tensor) -> Tensor:
        """Gather [B, N, ...] from [R, L, ...]: the step of each new node."""
        if self.whole and self.outputs.shape[1] == steps.shape[1]:
            return steps
        return steps.flatten(0, 1)[self.outputs.to(steps.device)]


def gather_entries(values: Tensor, sequences: Tensor, columns: Tensor) -> Tensor:
    """Gather [G, K, ...] from [B, U, ...]: some columns [G, K] of some sequences [G]."""
    return values[sequences[:, None].to(values.device), columns.to(values.device)]


def build_path_rows(seen: Tensor, places: Tensor) -> PathRows:
    """Build the rows of a forward.

    seen: [B, N, U] bool, the uncommitted columns that each new node sees; the last N are the new nodes' columns.
    places: [B, U] int64, the position in its sequence of each uncommitted column.
    """
    # 1. A node that no other new node sees ends a path. A padding node sees only itself, as the root does, and gets
    #    no row. If all nodes see only themselves (the first level of a draft), each gets a row.
    b, n, u = seen.shape
    new = torch.arange(n, device=seen.device)
    steps = seen.sum(2)  # [B, N] length of the path to each node
    below = (steps > 1) | (new == 0) | (steps.max() == 1)
    ends = (seen[:, :, u - n :].sum(1) == 1) & (below | (u > n))
    sequences, leaves = ends.nonzero(as_tuple=True)

    # 2. The columns of each path, by position.
    on_path = seen[sequences, leaves]  # [R, U]
    depth = int(steps[sequences, leaves].max())
    after = places.max() + 1
    columns = places[sequences].where(on_path, after).argsort(dim=1, stable=True)[:, :depth]

    # 3. Each node's step in the first row that holds it.
    rows = sequences == torch.arange(b, device=seen.device)[:, None]  # [B, R]
    holds = on_path[None, :, u - n :] & rows[:, :, None]  # [B, R, N]
    outputs = holds.int().argmax(1) * depth + steps - 1
    whole = torch.equal(columns, torch.arange(u, device=seen.device).expand(b, u))
    return PathRows(u, sequences, columns, outputs, whole)


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Inside, these modules have other forwards. forwards: {module: its forward inside}."""
    before = [(vars(module), vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for attributes, earlier in before:
            attributes["forward"] = earlier
            if earlier is None:
                del attributes["forward"]


def list_linear_layers(module: nn.Module) -> list[nn.Module]:
    """List the linear layers of a module, plain, packed or quantised: leaves with `in_features` and `out_features`."""
    layers = []
    for part in module.modules():
        has_widths = hasattr(part, "in_features") and hasattr(part, "out_features")
        if has_widths and not any(part.children()):
            layers.append(part)
    return layers


def replace_linear_forwards(
    module: nn.Module, compute: Callable[[nn.Module, Linear, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Inside, linear layers return `compute(layer, its unchanged forward, input)`."""
    return replaced(
        {layer: partial(compute, layer, layer.forward) for layer in list_linear_layers(module)}
    )


def replace_linear_by_call(
    module: nn.Module, shape: torch.Size, output: Callable[[Call, Linear, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Inside, linear layers return `output(call, their unchanged forward, input)` for inputs [*shape, in]."""
    calls: defaultdict[nn.Module, Iterator[int]] = defaultdict(count)

    def dense(layer: nn.Module, code: Linear, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[:2] != shape:
            return code(x)
        return output((layer, next(calls[layer])), code, x)

    return replace_linear_forwards(module, dense)


@contextmanager
def once_a_node(module: nn.Module, rows: PathRows) -> Iterator[Outputs]:
    """Inside, linear layers compute each node of the rows once. The dict receives their outputs."""
    known: Outputs = {}
    one_token = rows.whole and rows.width == 1  # `commit` finds the state after it in the trail
    if rows.width != rows.outputs.shape[1] or rows.width > MAX_KEPT_NODES or one_token:
        yield known
        return

    def output(call: Call, code: Linear, x: Tensor) -> Tensor:
        known[call] = code(rows.gather_node_steps(x))
        return rows.spread(known[call])

    with replace_linear_by_call(module, rows.columns.shape, output):
        yield known


def read_back(
    module: nn.Module, known: Outputs, sequences: Tensor, columns: Tensor
) -> AbstractContextManager[None]:
    """Inside, linear layers return their outputs of the last forward.

    Args:
        module: of the linear layers.
        known: their outputs, from `once_a_node`.
        sequences: [G] int64.
        columns: [G, K] int64, by sequence the nodes that it runs over.
    """

    def output(call: Call, code: Linear, x: Tensor) -> Tensor:
        if call not in known:
            return code(x)
        return gather_entries(known[call], sequences, columns)

    return replace_linear_by_call(module, columns.shape, output)


@contextmanager
def input_once(module: nn.Module, whole: Tensor) -> Iterator[list[Tensor]]:
    """Inside, linear layers over a module's input compute all tokens when they are called for the first token.

    whole: [R, L, H] the input. The caller appends the input [R, 1, H] of each token to the yielded list before it
    runs the token.
    """
    tokens: list[Tensor] = []
    done: dict[nn.Module, Tensor] = {}

    def dense(layer: nn.Module, code: Linear, x: Tensor) -> Tensor:
        if x is not tokens[-1]:
            return code(x)
        if layer not in done:
            done[layer] = code(whole)
        return done[layer][:, len(tokens) - 1 : len(tokens)]

    with replace_linear_forwards(module, dense):
        yield tokens
