"""Grows trees level by level: one draft step extends the trees of all sequences by a level.

A sequence's logits processors change the draft logits of each node, depending on the path to it. If they allow
only one token, it is forced: forced tokens form a chain above the drafted tree.
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


def select_best_tree(
    tokens: Sequence[Tensor], orders: Sequence[Tensor], scores: Sequence[Tensor], nodes: int
) -> tuple[TokenTree, Tensor]:
    """Keeps the best candidates; returns their tree and their columns [..., N]. All may be [...] of a batch.

    Column 0 is padding, column 1 the root; then come the candidates level by level, and the orders. Two levels;
    both nodes of the first are expanded, b before a, so c and d are below b:

        column    0 1  2 3  4 5 6 7  8 9          kept      1 3 4 2    columns, the best first: r b c a
        row       0 r  a b  c d e f  1 0          tokens    r b c a    `row` at the kept columns
        link      0 0  0 0  8 8 9 9               slot      0 0 1 0    `row` at `link`: the parent's slot
        first     0 0  1 1  2 2 2 2               parent    0 1 3 1    its column: `first` + slot
                                                  node     -1 0 1 0    its number among the kept

    Nodes are sorted best first, so that `commit` rarely has to copy columns. No child's score is above its
    parent's, and of equal scores the parent comes first; so a kept node's parent is kept.

    Args:
        tokens: [..., M] of the root and of each level.
        orders: [..., F] the slots of the expanded nodes in each level but the last.
        scores: [..., M] of each level.
        nodes: N, the root included.
    """
    # 1. Rank all columns. NaN sorts as the largest: padding comes first, the root second.
    first = scores[0]
    device = tokens[0].device
    *batch, children = first.shape
    largest = cache_tensor(
        torch.full, (*batch, 2), torch.nan, dtype=first.dtype, device=first.device
    )
    ranked = to_device(argsort_descending(torch.cat([largest, *scores], -1)), device)
    kept = ranked[..., 1 : nodes + 1]

    # 2. Tokens and parents of the kept columns.
    widths = tuple(order.shape[-1] for order in orders)
    facts = cache_tensor(build_column_facts, widths, children, device)
    kept_facts = facts[:4, kept]
    zero = cache_tensor(torch.zeros, (*batch, 1), dtype=torch.int64, device=device)
    row = torch.cat([zero, *tokens, *orders], -1)
    kept_tokens, parent_slots = row.expand(2, *row.shape).gather(-1, kept_facts[1:3])
    node_of_column = torch.empty_like(ranked).scatter_(-1, ranked, facts[4].expand_as(ranked))
    parents = node_of_column.gather(-1, kept_facts[3] + parent_slots)
    tree = TokenTree(kept_tokens, parents, kept_facts[0], build_ancestor_mask(parents))
    return tree, kept


def build_column_facts(widths: tuple[int, ...], children: int, device: torch.device) -> Tensor:
    """Returns [5, 2 + M] facts of each column of `select_best_tree`, which its figure shows.

    The rows are depth, the column's number, `link`, `first`, and the numbers -1, 0, 1, 2, …

    widths: the number of expanded nodes of each level but the last. children: of each expanded node.
    """
    counts = torch.tensor([2, *(children * width for width in (1, *widths))])
    column = torch.arange(int(counts.sum()))
    depth = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).clamp_min(1)[depth - 1]
    link = len(column) - 1 + (column - 2) // children
    first[:2] = link[: 2 + children] = 0
    return to_device(torch.stack([depth, column, link, first, column - 1]), device)


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


def prepend_forced_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """Puts forced tokens between the root and a tree (`treespec.trees.tree.prepend_chain`).

    A forced token is a draw from a one-hot q, so every verifier treats it as any other draw.

    root: [1] int64, on the host. chain: n forced tokens; the tree's root carries the last one.
    scheme: makes the draws.
    """
    # 1. Without draft distributions the children are a deterministic function of the sequence: no draws needed.
    chained_tree = prepend_chain(root, chain, tree)
    drafts = chained_tree.drafts
    if drafts is None:
        return chained_tree

    # 2. The draws at the chain's nodes.
    q = one_hot(to_device(chain, drafts.q.device), drafts.q.shape[-1]).to(drafts.q)  # [n, V]
    draws = scheme.draw(q, 1, generator)

    # 3. They come before the tree's draws.
    nodes = torch.arange(len(chain), device=drafts.nodes.device)
    chain_level = Drawn(nodes, q, draws)
    tree_levels = Drawn(drafts.nodes, drafts.q, drafts.draws)
    return replace(chained_tree, drafts=concat_levels([chain_level, tree_levels]))


def to_draft_ids(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """Converts a chain of the target's tokens to draft tokens [n]; None if one is not in the vocabulary.

    vocabulary: [N] int64 ascending, the target's token for each draft token; None: all, in order.
    """
    tokens = to_device(chain, device)
    if vocabulary is None:
        return tokens
    draft_tokens = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    if torch.equal(vocabulary[draft_tokens], tokens):
        return draft_tokens
    return None


class ForcedDrafter(Drafter):
    """Drafts below the forced tokens of each sequence.

    Attributes:
        scheme: makes the draws.
        forced: the forced tokens of each sequence in this cycle.
    """

    scheme: Scheme = TopK()
    forced: Sequence[ForcedTokens] = ()

    def end(self, row: int, root: int) -> int:
        """Returns the token below which a sequence's tree is drafted: its last forced token, or the root."""
        chain = self.forced[row].ids
        if not chain:
            return root
        return chain[-1]

    def prepend_forced_all(
        self, roots: Tensor, trees: Sequence[TokenTree], generators: Sequence[torch.Generator]
    ) -> list[TokenTree]:
        """Puts each sequence's forced tokens above its tree, whose root is the last of them (`end`).

        roots: [B] int64, on the host.
        """
        chained_trees = []
        for root, forced, tree, generator in zip(
            roots.split(1), self.forced, trees, generators, strict=True
        ):
            if forced.ids:
                tree = prepend_forced_chain(root, forced.ids, tree, self.scheme, generator)
            chained_trees.append(tree)
        return chained_trees
