"""Grows trees level by level: one draft step extends the trees of all sequences by a level.

A sequence's logits processors change the draft logits of each node, depending on the path to it.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafter import Frontier, Frontiers
from treespec.draft.vocabulary import spread
from treespec.sampling.probs import to_float
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.tree import Drafts, Draws, TokenTree, to_host


@dataclass(frozen=True)
class Drawn:
    """The draws of one level.

    Attributes:
        nodes: [F] int64, the numbers of its inner nodes.
        q: [F, V] the draft distribution at each of them.
        draws: [F, K] the draws from q.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


Grown = TypeVar("Grown")
# A generator. It yields a frontier and receives the draft logits [F, V] of its nodes' children, or it yields a
# tensor on a device and receives its copy on the host.
Growing = Generator[Frontier | Tensor, Tensor, Grown]
Growth = Growing[TokenTree]


# Returns for each sequence the draft logits [F, V] of its frontier's children; a frontier None is a finished tree.
Extend = Callable[[Frontiers], list[Tensor]]


def grow_together(extend: Extend, growths: Sequence[Growing[Grown]]) -> list[Grown]:
    """Runs the growth of each sequence, a level of all at a time, and returns the trees.

    All device tensors that the growths yield in one round are copied together: the host waits once.
    """
    trees: dict[int, Grown] = {}

    def step(row: int, reply: Tensor | None) -> Frontier | Tensor | None:
        try:
            return next(growths[row]) if reply is None else growths[row].send(reply)
        except StopIteration as end:
            trees[row] = end.value
            return None

    requests = [step(row, None) for row in range(len(growths))]
    while len(trees) < len(growths):
        tensors = {row: part for row, part in enumerate(requests) if isinstance(part, Tensor)}
        if tensors:
            for row, host_copy in zip(tensors, to_host([*tensors.values()]), strict=True):
                requests[row] = step(row, host_copy)
        else:
            frontiers = cast(Frontiers, requests)
            logits = extend(frontiers)
            requests = [part and step(row, logits[row]) for row, part in enumerate(frontiers)]
    return [trees[row] for row in range(len(growths))]


def concat_levels(levels: list[Drawn]) -> Drafts | None:
    """Joins the distributions and draws of all levels; returns None without levels."""
    if not levels:
        return None
    nodes = torch.cat([level.nodes for level in levels])
    q = pad_and_concat([level.q for level in levels])
    return Drafts(nodes, q, stack_draws([level.draws for level in levels]))


def stack_draws(draws: list[Draws]) -> Draws:
    """Joins the draws of several levels into one table; absent draws pad the narrower levels."""
    tokens = pad_and_concat([level.tokens for level in draws], -1)
    sure = None
    if draws[0].sure is not None:
        sure = pad_and_concat([level.sure for level in draws], False)
    uniforms = None
    if draws[0].uniforms is not None:
        uniforms = pad_and_concat([level.uniforms for level in draws])
    return Draws(tokens, sure, uniforms)


def pad_and_concat(levels: Sequence[Any], fill: float = 0.0) -> Tensor:
    """Concatenates the rows of several levels [F, K, ...]. `fill` pads the narrower levels in K.

    Levels [1, 3] and [2, 2]:

        a b c          a b c
        d e      ->    d e .
        f g            f g .
    """
    widest = max(level.shape[1] for level in levels)
    padded = []
    for level in levels:
        missing = widest - level.shape[1]
        if missing:
            later_dimensions = (0, 0) * (level.dim() - 2)
            level = pad(level, later_dimensions + (0, missing), value=fill)
        padded.append(level)
    return torch.cat(padded)


@dataclass(frozen=True)
class ShapedDrafts:
    """Draft logits after a sequence's logits processors.

    Attributes:
        in_draft: [F, N] over the draft vocabulary, to draw from. A row whose tokens are all forbidden keeps
            its logits: its draws must come from some distribution, and the target rejects them all.
        in_target: [F, V] over the target's vocabulary; -inf if a token is forbidden or cannot be drafted.
    """

    in_draft: Tensor
    in_target: Tensor


def process_draft_logits(
    sampler: Sampler, paths: Sequence[Path], logits: Tensor, vocabulary: Tensor | None, size: int
) -> ShapedDrafts:
    """Applies a sequence's logits processors to draft logits, as they are applied to the target's.

    Args:
        sampler: holds the sequence's processors.
        paths: of the F nodes, in the target's tokens.
        logits: [F, N] draft logits of the nodes' children.
        vocabulary: [N] int64, the target's token for each draft token; None: all V, in order.
        size: V, the size of the target's vocabulary.
    """
    # 1. One row per path, over all V tokens.
    rows = to_float(logits)
    if vocabulary is None:
        in_target = sampler.process_logits(paths, rows)
        in_draft = in_target
    else:
        in_target = sampler.process_logits(paths, spread(rows, vocabulary, size, -torch.inf))
        in_draft = in_target[:, vocabulary]

    # 2. Rows without an allowed token stay as they were.
    is_empty = in_draft.amax(-1, keepdim=True) == -torch.inf
    return ShapedDrafts(torch.where(is_empty, rows, in_draft), in_target)
