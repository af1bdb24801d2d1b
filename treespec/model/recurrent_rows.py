"""Trees as a batch of their paths, for layers whose state goes from token to token.

A recurrent layer cannot take a mask: it reads its tokens in order. But a node's state follows from
its parent's. So a tree goes through such a layer as one batch row a leaf, each the path from the
root to that leaf. The five-node example of `trees/mask.py`, behind a text with state s:

      0
     / \\        row 0    s | 0 1 3      outputs of nodes 0 1 3: row 0, steps 0 1 2
    1   2       row 1    s | 0 2 4      outputs of nodes   2 4: row 1, steps   1 2
    |   |
    3   4

Each row starts from the state of its text. What a linear layer gives depends on the node alone. So it
computes each node once in a forward, and `commit` reads that back instead of the weights:

    rows      0 1 3 | 0 2 4      linear layers over 0 1 2 3 4, spread to 0 1 3 | 0 2 4
    commit    0 2 4              what they gave for 0 2 4
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

MOST = 128  # nodes of a forward whose outputs are kept: more than a tree has, fewer than a prompt
Linear = Callable[[Tensor], Tensor]
Known = dict[nn.Module, Tensor]  # [B, N, out] of each linear layer


@final
@dataclass(frozen=True)
class PathRows:
    """The paths of the trees of B texts, each text with U uncommitted columns, of which N are new.

    width: U.
    texts: [R] int64, the text of each row.
    columns: [R, L] int64, the uncommitted column of each step; behind the end of a path any other.
    outputs: [B, N] int64, the place of each new node among the R * L steps.
    whole: whether row b is text b with all its columns in order, as in a chain.
    """

    width: int
    texts: Tensor
    columns: Tensor
    outputs: Tensor
    whole: bool

    def spread(self, nodes: Tensor) -> Tensor:
        """[R, L, ...] from [B, U, ...]: what each step's node has."""
        return nodes if self.whole else entries(nodes, self.texts, self.columns)

    def gathered(self, steps: Tensor) -> Tensor:
        """[B, N, ...] from [R, L, ...]: each new node's own step."""
        if self.whole and self.outputs.shape[1] == steps.shape[1]:
            return steps
        places = self.outputs.flatten().to(steps.device)
        flat = steps.flatten(0, 1).index_select(0, places)
        return flat.unflatten(0, self.outputs.shape)


def entries(values: Tensor, texts: Tensor, columns: Tensor) -> Tensor:
    """[G, K, ...] from [B, U, ...]: some columns [G, K] of some texts [G]."""
    return values[texts[:, None].to(values.device), columns.to(values.device)]


def path_rows(seen: Tensor, places: Tensor) -> PathRows:
    """The rows of a forward.

    seen: [B, N, U] bool, the uncommitted columns that each new node sees; the last N are their own.
    places: [B, U] int64, the position in its text of each uncommitted column.
    """
    # 1. A node that no other new node sees ends a path. Padding of a tree stands beside the root: no
    #    row. In a level of a draft, all nodes stand beside the first, and each has a row.
    b, n, u = seen.shape
    steps = seen.sum(2)  # [B, N] length of the path to each node
    own = seen[:, :, u - n :]
    above = own & ~torch.eye(n, dtype=torch.bool, device=seen.device)
    ends = ~above.any(1)
    if u == n and bool((places > places[:, :1]).any()):
        padding = (steps == 1) & (places == places[:, :1])
        padding[:, 0] = False
        ends &= ~padding
    texts, leaves = ends.nonzero(as_tuple=True)

    # 2. The columns of each path, by position.
    on_path = seen[texts, leaves]  # [R, U]
    depth = int(steps[texts, leaves].max())
    far = places.max() + 1
    columns = places[texts].where(on_path, far).argsort(dim=1, stable=True)[:, :depth]

    # 3. Each node's step in the first row that holds it.
    rows = texts == torch.arange(b, device=seen.device)[:, None]  # [B, R]
    holds = on_path[None, :, u - n :] & rows[:, :, None]  # [B, R, N]
    outputs = holds.int().argmax(1) * depth + steps - 1
    in_order = depth == u and len(texts) == b and bool((steps[:, -1] == u).all())
    whole = in_order and bool((places.diff() > 0).all())
    return PathRows(u, texts, columns, outputs, whole)


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Inside, these modules have other forwards."""
    before = [(vars(module), vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for own, earlier in before:
            if earlier is None:
                own.pop("forward", None)
            else:
                own["forward"] = earlier


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a module, plain, packed or quantised: they say their widths."""
    sized = (part for part in module.modules() if hasattr(part, "in_features"))
    return [part for part in sized if hasattr(part, "out_features") and not any(part.children())]


def computed(
    layers: Iterable[nn.Module], compute: Callable[[nn.Module, Linear, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Inside, `compute` gets the layer, its own forward and the input, and gives the output."""
    return replaced({layer: partial(compute, layer, layer.forward) for layer in layers})


@contextmanager
def once_a_node(module: nn.Module, rows: PathRows) -> Iterator[Known]:
    """Inside, linear layers compute each node of the rows once. The dict gets their outputs."""
    known: Known = {}
    twice: set[nn.Module] = set()
    one_token = rows.whole and rows.width == 1  # `commit` needs no more than its states
    if rows.width != rows.outputs.shape[1] or rows.width > MOST or one_token:
        yield known
        return

    def dense(layer: nn.Module, code: Linear, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[:2] != rows.columns.shape:
            return code(x)
        if layer in known:
            twice.add(layer)
        known[layer] = code(rows.gathered(x))
        return rows.spread(known[layer])

    with computed(linear_layers(module), dense):
        yield known
    for layer in twice:  # `commit` could not tell its outputs apart
        del known[layer]


@contextmanager
def read_back(known: Known, texts: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, linear layers give what they gave in the forward.

    texts: [G] int64. columns: [G, K] int64, the nodes that each of them runs over.
    """

    def dense(layer: nn.Module, code: Linear, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[:2] != columns.shape:
            return code(x)
        return entries(known[layer], texts, columns)

    with computed(known, dense):
        yield


@contextmanager
def input_once(module: nn.Module, whole: Tensor) -> Iterator[list[tuple[Tensor, int]]]:
    """Inside, linear layers over a module's input compute all tokens when they see the first.

    whole: [R, L, H] the input. The list gets the present token's input, [R, 1, H], and its number.
    """
    current: list[tuple[Tensor, int]] = []
    done: Known = {}

    def dense(layer: nn.Module, code: Linear, x: Tensor) -> Tensor:
        part, number = current[0]
        if x is not part:
            return code(x)
        if layer not in done:
            done[layer] = code(whole)
        return done[layer][:, number : number + 1]

    with computed(linear_layers(module), dense):
        yield current
