"""The growth of a tree from draft logits that a text's law shapes, each row by its node's path."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treespec.draft.grow.growth import Growth
from treespec.draft.vocabulary import spread
from treespec.shaping.law import Law, Path
from treespec.trees.tree import TokenTree

Shape = Callable[[Sequence[Path], Tensor], Tensor]


def grow_shaped(
    grow: Callable[[Tensor], Growth],
    logits: Tensor,
    shape: Shape,
    names: Tensor | None,
    above: Path = (),
) -> Growth:
    """The growth that `grow` begins, with shaped logits in place of the draft model's.

    logits: [1, N] draft logits of the root's children. shape: of paths in the target's tokens.
    names: [N] the target's token for each draft token; None: they are the same. above: the path of
    the tree's root, where forced tokens stand above it.
    """
    paths: list[Path] = [above]
    growth = grow(shape(paths, logits))
    try:
        frontier = next(growth)
        while True:
            drafted = yield frontier
            tokens = frontier.tokens if names is None else names[frontier.tokens]
            links = zip(frontier.parent_rows.tolist(), tokens.tolist(), strict=True)
            paths = [(*paths[row], token) for row, token in links]
            frontier = growth.send(shape(paths, drafted))
    except StopIteration as end:
        tree: TokenTree = end.value
        return tree


def shape_drafts(
    law: Law, paths: Sequence[Path], logits: Tensor, vocabulary: Tensor | None, size: int
) -> Tensor:
    """Draft logits as the law shapes them, over a draft vocabulary of N tokens or all V = `size`.

    A row whose tokens are all forbidden keeps its logits: its draws must come from some law, and
    the target's law refuses them all. paths: F, in the target's tokens. logits: [F, N], or
    [F, M, N] of M draft models. vocabulary: [N] the target's tokens.
    """
    # 1. One row a path, over all V tokens.
    rows, each = logits if logits.dtype == torch.float64 else logits.float(), list(paths)
    if logits.dim() == 3:
        each = [path for path in paths for _ in range(logits.shape[1])]
        rows = rows.flatten(0, 1)
    whole = rows if vocabulary is None else spread(rows, vocabulary, size, -torch.inf)

    # 2. The same shapers as the target's, then the draft tokens alone.
    shaped = law.shape(each, whole)
    if law.heard is not None:
        by_path = shaped.view(*logits.shape[:-1], -1)
        law.heard.update(zip(paths, by_path, strict=True))
    if vocabulary is not None:
        shaped = shaped[:, vocabulary]
    empty = shaped.amax(-1, keepdim=True) == -torch.inf
    return torch.where(empty, rows, shaped).view_as(logits)
