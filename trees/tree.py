"""A token tree: the draft that a target scores in one forward and a verifier judges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_device(values: Any, device: torch.device) -> Tensor:
    """Numbers or a tensor on a device. CPU data is copied from pinned memory, without waiting."""
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # only a pinned copy runs by itself


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the host, in one copy, so that it waits once. All get a common dtype."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@lru_cache(1024)
def cache_tensor(make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """The tensor `make(*args, **options)`, kept for later cycles. Training may use it too: it is made outside
    of inference mode.
    """
    with torch.inference_mode(mode=False):
        return make(*args, **options)


def build_range(count: int, device: torch.device) -> Tensor:
    """[count] int64: 0, 1, 2, …"""
    return cache_tensor(torch.arange, 1 << count.bit_length(), device=device)[:count]


@dataclass(frozen=True)
class Draws:
    """The draws at B nodes, in draw order. A field that no scheme filled is None.

    tokens: [B, K] int64. A repeated token is a draw of its own; -1 is an absent draw.
    sure: [B, K] bool, the tokens that are taken from q for sure, not drawn.
    uniforms: [B, K, 2] float64 in [0, 1), independent of the tokens; `optimal` scores draws with
    them.
    """

    tokens: Tensor
    sure: Tensor | None = None
    uniforms: Tensor | None = None

    def apply_to_fields(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """Apply `change` to every field that is not None."""

        sure = self.sure
        if sure is not None:
            sure = change(sure)
        uniforms = self.uniforms
        if uniforms is not None:
            uniforms = change(uniforms)
        return Draws(change(self.tokens), sure, uniforms)

    def select_rows(self, nodes: Tensor | slice) -> "Draws":
        """The draws at these rows."""
        return self.apply_to_fields(lambda field: field[nodes])

    def select_columns(self, order: Tensor) -> "Draws":
        """The draws in these columns of each row. order: [B, M] int64."""

        def take(field: Tensor) -> Tensor:
            if field.dim() == 3:  # [B, K, 2] uniforms
                return field.take_along_dim(order[..., None], 1)
            return field.take_along_dim(order, 1)

        return self.apply_to_fields(take)


@dataclass(frozen=True)
class Drafts:
    """The distributions and the draws at the I inner nodes of a tree.

    nodes: [I] int64 node numbers.
    q: [I, V] probabilities that a node's draws came from.
    draws: one row for each of the I nodes.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


@dataclass(frozen=True)
class TokenTree:
    """N nodes; node 0 is the root, the last committed token.

    tokens: [N] int64; -1 where a node's draw is absent.
    parents: [N] int64, parents[0] = -1 and parents[i] < i.
    depth: [N] int64, depth[0] = 0.
    ancestors: [N, N] bool; row i marks node i and its ancestors.
    drafts: the distributions and draws; None if the children were chosen deterministically (top-k,
    retrieval).

    Five nodes with the tokens r a b c d:

        0 r ─┬─ 1 a ── 3 c        tokens     r  a  b  c  d
             └─ 2 b ── 4 d        parents    -1 0  0  1  2
                                  depth      0  1  1  2  2      ancestors: see `treespec.trees.mask`

    A verifier takes a node's first child with a token, so it never reaches the node of a repeat.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    drafts: Drafts | None = None


def build_root_tree(token: Tensor) -> TokenTree:
    """The tree of one-token-at-a-time decoding: a root without children. token: [1] int64."""
    zero = torch.zeros(1, dtype=torch.int64, device=token.device)
    return TokenTree(token, zero - 1, zero, torch.ones(1, 1, dtype=torch.bool, device=token.device))


def prepend_chain(root: Tensor, chain: Sequence[int], tree: TokenTree) -> TokenTree:
    """The tree below the last token of a chain, which hangs below the root.

    A root r, the chain a b, and a tree below b. The chain's nodes have no draws.

        r ─── a ─── b ─┬─ c        nodes 0 1 2 3 4
                       └─ d

    root: [1] int64, on the host. chain: n ≥ 1 tokens; the tree's root carries the last one.
    """
    # 1. The chain's nodes come first.
    n = len(chain)
    device = tree.tokens.device
    nodes = torch.arange(n, device=device)
    chain_tokens = root.tolist() + list(chain[:-1])
    tokens = torch.cat([to_device(chain_tokens, device), tree.tokens])
    parents = torch.cat([nodes - 1, tree.parents + n])
    depth = torch.cat([nodes, tree.depth + n])
    chained = pad(nodes[:, None] >= nodes, (0, len(tree.tokens)))
    ancestors = torch.cat([chained, pad(tree.ancestors, (n, 0), value=True)])

    # 2. Distributions and draws move with their nodes.
    drafts = tree.drafts
    if drafts is not None:
        drafts = replace(drafts, nodes=drafts.nodes + n)
    return TokenTree(tokens, parents, depth, ancestors, drafts)


def cut_below(tree: TokenTree, deepest: int) -> tuple[TokenTree, list[int]]:
    """The tree without the nodes deeper than `deepest`, and its nodes' numbers in the whole tree.

    Nodes at the depth `deepest` have no draws any more. That depends on no token, so a lossless verifier
    stays lossless. Five nodes, cut below depth 1:

        0 ─┬─ 1 ── 3         0 ─┬─ 1        numbers in the whole tree: 0 1 2
           └─ 2 ── 4            └─ 2        the draws of nodes 1 and 2 go
    """
    # 1. The nodes that stay, and their new numbers.
    stays = tree.depth <= deepest
    kept = stays.nonzero().flatten()
    number = stays.cumsum(0) - 1
    parents = tree.parents[kept]
    parents = number[parents.clamp_min(0)].where(parents >= 0, parents)
    ancestors = tree.ancestors[kept][:, kept]

    # 2. Their draws.
    drafts = None
    if tree.drafts is not None:
        rows = (tree.depth[tree.drafts.nodes] < deepest).nonzero().flatten()
        if len(rows):
            nodes = number[tree.drafts.nodes[rows]]
            drafts = Drafts(nodes, tree.drafts.q[rows], tree.drafts.draws.select_rows(rows))
    cut = TokenTree(tree.tokens[kept], parents, tree.depth[kept], ancestors, drafts)
    return cut, kept.tolist()


def argsort_descending(scores: Tensor, count: int | None = None) -> Tensor:
    """[..., min(count, M)] numbers of the best candidates, best first; by default of all. scores: [..., M].

    Of equal scores the earlier candidate wins, which is the shallower one.
    """
    return scores.sort(descending=True, stable=True).indices[..., :count]
