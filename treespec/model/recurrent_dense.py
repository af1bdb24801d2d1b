"""The linear layers of a mixer, computed once a node.

A mixer runs over the paths of a tree, where a node on several paths stands several times, and at
commit over the accepted nodes again. What a linear layer gives depends on the node alone. So it
computes each node once in a forward, and `commit` reads that back instead of the weights:

    rows      0 1 3 | 0 2 4      linear layers over 0 1 2 3 4, spread to 0 1 3 | 0 2 4
    commit    0 2 4              what they gave for 0 2 4
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from treespec.model.recurrent_rows import PathRows

MOST = 128  # nodes of a forward whose outputs are kept: more than a tree has, fewer than a prompt
Linear = Callable[[Tensor], Tensor]
Known = dict[nn.Module, Tensor]  # [B, N, out] of each linear layer


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Inside, these modules have other forwards."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a module, plain, packed or quantised: they say their widths."""
    return [
        part
        for part in module.modules()
        if hasattr(part, "in_features")
        and hasattr(part, "out_features")
        and not any(part.children())
    ]


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

    layers = linear_layers(module)
    with replaced({layer: partial(dense, layer, layer.forward) for layer in layers}):
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
        outputs = known[layer]
        return outputs[texts[:, None].to(outputs.device), columns.to(outputs.device)]

    with replaced({layer: partial(dense, layer, layer.forward) for layer in known}):
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

    layers = linear_layers(module)
    with replaced({layer: partial(dense, layer, layer.forward) for layer in layers}):
        yield current
