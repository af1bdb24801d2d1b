"""Trees that grow level by level: one draft step extends the trees of all sequences by a level.

A sequence's logits processors change the draft logits, each row by the path to its node. Forced tokens,
which they leave no choice about, are a chain above the drafted tree.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from treespec.draft.drafter import Drafter, Frontier, Frontiers
from treespec.draft.vocabulary import spread
from treespec.sampling.probs import to_float
from treespec.sampling.sampler import ForcedTokens, Path, Sampler
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.tree import (
    Drafts,
    Draws,
    TokenTree,
    argsort_descending,
    cache_tensor,
    prepend_chain,
    to_device,
    to_host,
)
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


@dataclass(frozen=True)
class Drawn:
    """One level: its F inner nodes [F] int64, their q [F, V] and their draws [F, K]."""

    nodes: Tensor
    q: Tensor
    draws: Draws


Grown = TypeVar("Grown")
# A generator that yields a frontier of F nodes and is sent the draft logits [F, V] below them, or a
# tensor and is sent its numbers on the host.
Growing = Generator[Frontier | Tensor, Tensor, Grown]
Growth = Growing[TokenTree]


# For each sequence the draft logits [F, V] below its frontier; None is a finished tree.
Extend = Callable[[Frontiers], list[Tensor]]


def grow_together(extend: Extend, growths: Sequence[Growing[Grown]]) -> list[Grown]:
    """Run the growth of each sequence, a level of all at a time, and return the trees.

    The host waits once for the numbers that all of them ask for.
    """
    grown: dict[int, Grown] = {}

    def step(row: int, answer: Tensor | None) -> Frontier | Tensor | None:
        try:
            return next(growths[row]) if answer is None else growths[row].send(answer)
        except StopIteration as end:
            grown[row] = end.value
            return None

    found = [step(row, None) for row in range(len(growths))]
    while len(grown) < len(growths):
        asked = {row: part for row, part in enumerate(found) if isinstance(part, Tensor)}
        if asked:
            for row, numbers in zip(asked, to_host([*asked.values()]), strict=True):
                found[row] = step(row, numbers)
        else:
            frontiers = cast(Frontiers, found)
            below = extend(frontiers)
            found = [part and step(row, below[row]) for row, part in enumerate(frontiers)]
    return [grown[row] for row in range(len(growths))]


def select_best_tree(
    tokens: Sequence[Tensor], orders: Sequence[Tensor], scores: Sequence[Tensor], nodes: int
) -> tuple[TokenTree, Tensor]:
    """The tree of the best candidates, or [...] trees of a batch, and their columns [..., N].

    Candidates are numbered level by level, after a column of nothing and the root's. Two levels; both
    nodes of the first are expanded, b before a:

        column    0 1  2 3  4 5 6 7  8 9          kept      1 3 4 2    the best first: r b c a
        row       0 r  a b  c d e f  1 0          tokens    r b c a
        link      0 0  0 0  8 8 9 9               place     0 0 1 0    the row at `link`: the parent's
        first     0 0  1 1  2 2 2 2               parent    0 1 3 1    place after column `first`
                                                  node     -1 0 1 0    its number among the kept

    A likely path lies where `commit` leaves it. Of equals the parent comes first, so with a node its
    parent is kept.

    tokens: of the root and of each level, [..., M]. orders: the places in each level but the last of
    its expanded nodes [..., F]. scores: of each level, [..., M]. nodes: N, the root included.
    """
    # 1. Rank all columns. What is no number is the largest: nothing is first, the root second.
    first = scores[0]
    device = tokens[0].device
    *batch, children = first.shape
    unbeaten = cache_tensor(
        torch.full, (*batch, 2), torch.nan, dtype=first.dtype, device=first.device
    )
    ranked = to_device(argsort_descending(torch.cat([unbeaten, *scores], -1)), device)
    kept = ranked[..., 1 : nodes + 1]

    # 2. Tokens and parents of those to keep.
    widths = tuple(order.shape[-1] for order in orders)
    facts = cache_tensor(build_column_facts, widths, children, device)
    known = facts[:4, kept]
    zero = cache_tensor(torch.zeros, (*batch, 1), dtype=torch.int64, device=device)
    row = torch.cat([zero, *tokens, *orders], -1)
    drafted, place = row.expand(2, *row.shape).gather(-1, known[1:3])
    number = torch.empty_like(ranked).scatter_(-1, ranked, facts[4].expand_as(ranked))
    parents = number.gather(-1, known[3] + place)
    return TokenTree(drafted, parents, known[0], build_ancestor_mask(parents)), kept


def build_column_facts(widths: tuple[int, ...], children: int, device: torch.device) -> Tensor:
    """[5, 2 + M] of each column of `select_best_tree`: depth, itself, link and first; and -1, 0, 1, 2, …

    widths: expanded nodes of each level but the last.
    """
    counts = torch.tensor([2, *(children * width for width in (1, *widths))])
    column = torch.arange(int(counts.sum()))
    depth = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).clamp_min(1)[depth - 1]
    link = len(column) - 1 + (column - 2) // children
    first[:2] = link[: 2 + children] = 0
    return to_device(torch.stack([depth, column, link, first, column - 1]), device)


def concat_levels(levels: list[Drawn]) -> Drafts | None:
    """The distributions and draws of all levels; None without any level."""
    if not levels:
        return None
    nodes = torch.cat([level.nodes for level in levels])
    q = pad_and_concat([level.q for level in levels])
    return Drafts(nodes, q, stack_draws([level.draws for level in levels]))


def stack_draws(draws: list[Draws]) -> Draws:
    """The draws of several levels as one table. Absent draws pad the narrower levels."""

    tokens = pad_and_concat([level.tokens for level in draws], -1)
    sure = None
    if draws[0].sure is not None:
        sure = pad_and_concat([level.sure for level in draws], False)
    uniforms = None
    if draws[0].uniforms is not None:
        uniforms = pad_and_concat([level.uniforms for level in draws])
    return Draws(tokens, sure, uniforms)


def pad_and_concat(levels: Sequence[Any], fill: float = 0.0) -> Tensor:
    """[I, V] or [I, K, ...]: the rows of several levels. `fill` pads the narrower levels in K.

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
    """Draft logits as a sequence's processors change them.

    in_draft: [F, N] over the draft vocabulary, to draw from. A row whose tokens are all forbidden keeps its
    logits: its draws must come from some distribution, and the target refuses them all.
    in_target: [F, V] over the target's vocabulary, -inf where a token is forbidden or cannot be drafted.
    """

    in_draft: Tensor
    in_target: Tensor


def process_draft_logits(
    sampler: Sampler, paths: Sequence[Path], logits: Tensor, vocabulary: Tensor | None, size: int
) -> ShapedDrafts:
    """Draft logits as the target's are shaped, over a draft vocabulary of N tokens or all V = `size`.

    Args:
        by: the sequence's distribution, whose shapers these are.
        paths: of the F nodes, in the target's tokens.
        logits: [F, N] draft logits below the nodes.
        vocabulary: [N] the target's token for each draft token; None: all V, in order.
        size: V.
    """
    # 1. One row a path, over all V tokens.
    rows = to_float(logits)
    if vocabulary is None:
        in_target = sampler.process_logits(paths, rows)
        in_draft = in_target
    else:
        in_target = sampler.process_logits(paths, spread(rows, vocabulary, size, -torch.inf))
        in_draft = in_target[:, vocabulary]

    # 2. Rows without an allowed token stay.
    is_empty = in_draft.amax(-1, keepdim=True) == -torch.inf
    return ShapedDrafts(torch.where(is_empty, rows, in_draft), in_target)


def prepend_forced_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """A tree with forced tokens above it (`treespec.trees.tree.prepend_chain`).

    A forced token is a draw from a one-hot q, so every verifier answers it as any other draw.
    root: [1] int64, on the host. chain: n tokens; the tree's root carries the last one. scheme: of the draws.
    """
    # 1. Without draft distributions, the children are a function of the text anyway.
    hung = prepend_chain(root, chain, tree)
    drafts = hung.drafts
    if drafts is None:
        return hung

    # 2. The draws at the chain's nodes.
    q = one_hot(to_device(chain, drafts.q.device), drafts.q.shape[-1]).to(drafts.q)  # [n, V]
    draws = scheme.draw(q, 1, generator)

    # 3. They stand before the tree's.
    nodes = torch.arange(len(chain), device=drafts.nodes.device)
    of_chain = Drawn(nodes, q, draws)
    of_tree = Drawn(drafts.nodes, drafts.q, drafts.draws)
    return replace(hung, drafts=concat_levels([of_chain, of_tree]))


def to_draft_ids(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """[n] the draft tokens of a chain; None where one of them is not in the draft vocabulary [N]."""
    tokens = to_device(chain, device)
    if vocabulary is None:
        return tokens
    draft_tokens = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    if torch.equal(vocabulary[draft_tokens], tokens):
        return draft_tokens
    return None


class ForcedDrafter(Drafter):
    """Drafts below the forced tokens of each sequence.

    scheme: of the draws. forced: the forced tokens of this cycle, by sequence.
    """

    scheme: Scheme = TopK()
    forced: Sequence[ForcedTokens] = ()

    def end(self, row: int, root: int) -> int:
        """The token below which a sequence's tree is drafted."""
        chain = self.forced[row].ids
        if not chain:
            return root
        return chain[-1]

    def prepend_forced_all(
        self, roots: Tensor, trees: Sequence[TokenTree], generators: Sequence[torch.Generator]
    ) -> list[TokenTree]:
        """The trees below the forced tokens. Each tree's root is the last of them (`end`).

        roots: [B] int64, on the host.
        """
        hung_trees = []
        for root, forced, tree, generator in zip(
            roots.split(1), self.forced, trees, generators, strict=True
        ):
            if forced.ids:
                tree = prepend_forced_chain(root, forced.ids, tree, self.scheme, generator)
            hung_trees.append(tree)
        return hung_trees
