"""A token tree: the draft that a target scores in one forward and that a verifier accepts a path of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_device(values: Any, device: torch.device) -> Tensor:
    """Copies numbers or a tensor to a device. CPU data is copied from pinned memory, without blocking."""
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # only pinned copies do not block


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors of one device to the host in one copy, so that the host waits only once.

    All are promoted to a common dtype.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@lru_cache(1024)
def cache_tensor(make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Caches the tensor that `make(*args, **options)` returns, for later cycles.

    It is created outside inference mode, so that training may use it too.
    """
    with torch.inference_mode(mode=False):
        return make(*args, **options)


def build_range(count: int, device: torch.device) -> Tensor:
    """Returns [count] int64: 0, 1, 2, …"""
    return cache_tensor(torch.arange, 1 << count.bit_length(), device=device)[:count]


@dataclass(frozen=True)
class Draws:
    """The draws at B nodes, in draw order.

    Attributes:
        tokens: [B, K] int64. A repeated token is a separate draw; -1 is an absent draw.
        sure: [B, K] bool, whether a token was taken from q with certainty instead of drawn; None: all drawn.
        uniforms: [B, K, 2] float64 in [0, 1), independent of the tokens: `optimal` scores draws with them.
            None: the scheme needs none.
    """

    tokens: Tensor
    sure: Tensor | None = None
    uniforms: Tensor | None = None

    def apply_to_fields(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """Applies `change` to every field that is not None."""
        sure = self.sure
        if sure is not None:
            sure = change(sure)
        uniforms = self.uniforms
        if uniforms is not None:
            uniforms = change(uniforms)
        return Draws(change(self.tokens), sure, uniforms)

    def select_rows(self, nodes: Tensor | slice) -> "Draws":
        """Returns the draws in these rows."""
        return self.apply_to_fields(lambda field: field[nodes])

    def select_columns(self, order: Tensor) -> "Draws":
        """Returns the draws in these columns of each row. order: [B, M] int64."""

        def take(field: Tensor) -> Tensor:
            if field.dim() == 3:  # [B, K, 2] uniforms
                return field.take_along_dim(order[..., None], 1)
            return field.take_along_dim(order, 1)

        return self.apply_to_fields(take)


@dataclass(frozen=True)
class Drafts:
    """The distributions and the draws at the I inner nodes of a tree.

    Attributes:
        nodes: [I] int64 node numbers.
        q: [I, V] the draft distribution at each node; [I, M, V] of M draft models that take turns: draw k comes from
            model k mod M.
        draws: the draws from q, one row for each of the I nodes.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


@dataclass(frozen=True)
class TokenTree:
    """A tree of N nodes; node 0 is the root, the last committed token.

    Attributes:
        tokens: [N] int64; -1 if a node's draw is absent.
        parents: [N] int64, parents[0] = -1 and parents[i] < i.
        depth: [N] int64, depth[0] = 0.
        ancestors: [N, N] bool; row i marks node i and its ancestors.
        drafts: the distributions and draws; None if the children were chosen deterministically (top-k,
            retrieval).

    Five nodes with the tokens r a b c d:

        0 r ─┬─ 1 a ── 3 c        tokens     r  a  b  c  d
             └─ 2 b ── 4 d        parents    -1 0  0  1  2
                                  depth      0  1  1  2  2      ancestors: see `treespec.trees.mask`

    A verifier follows a node's first child that has the accepted token. So it never reaches the node of a
    repeated draw.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    drafts: Drafts | None = None


def build_root_tree(token: Tensor) -> TokenTree:
    """Builds the tree of one-token-at-a-time decoding: a root without children. token: [1] int64."""
    device = token.device
    parents = cache_tensor(torch.full, (1,), -1, dtype=torch.int64, device=device)
    depth = cache_tensor(torch.zeros, 1, dtype=torch.int64, device=device)
    ancestors = cache_tensor(torch.ones, 1, 1, dtype=torch.bool, device=device)
    return TokenTree(token, parents, depth, ancestors)


def prepend_chain(root: Tensor, chain: Sequence[int], tree: TokenTree) -> TokenTree:
    """Puts a chain of tokens between the root and a tree; the tree's root carries the chain's last token.

    A root r, the chain a b, and a tree below b. The nodes r and a get no draws:

        r ─── a ─── b ─┬─ c        nodes 0 1 2 3 4
                       └─ d

    root: [1] int64, on the host. chain: n ≥ 1 tokens.
    """
    # 1. The root and the chain come first.
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
    """Removes the nodes deeper than `deepest`; also returns the old numbers of the nodes that stay.

    Nodes at depth `deepest` lose their draws. No token influences the cut, so a lossless verifier stays
    lossless. Five nodes, cut below depth 1:

        0 ─┬─ 1 ── 3         0 ─┬─ 1        old numbers: 0 1 2
           └─ 2 ── 4            └─ 2        the draws at nodes 1 and 2 are removed
    """
    # 1. The nodes that stay, and their new numbers.
    stays = tree.depth <= deepest
    old_numbers = stays.nonzero().flatten()
    new_numbers = stays.cumsum(0) - 1
    parents = tree.parents[old_numbers]
    parents = new_numbers[parents.clamp_min(0)].where(parents >= 0, parents)
    ancestors = tree.ancestors[old_numbers][:, old_numbers]

    # 2. Their draws.
    drafts = None
    if tree.drafts is not None:
        rows = (tree.depth[tree.drafts.nodes] < deepest).nonzero().flatten()
        if len(rows):
            nodes = new_numbers[tree.drafts.nodes[rows]]
            drafts = Drafts(nodes, tree.drafts.q[rows], tree.drafts.draws.select_rows(rows))
    cut = TokenTree(tree.tokens[old_numbers], parents, tree.depth[old_numbers], ancestors, drafts)
    return cut, old_numbers.tolist()


def argsort_descending(scores: Tensor, count: int | None = None) -> Tensor:
    """Returns [..., min(count, M)] the indices of the highest scores, highest first.

    Of equal scores the earlier one comes first: candidates are numbered level by level, so that is the
    shallower one.

    scores: [..., M]. count: None: all M.
    """
    return scores.sort(descending=True, stable=True).indices[..., :count]
