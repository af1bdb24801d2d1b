"""A tree with a chain above it.

A root r, the chain a b, and a tree below b:

    r ─── a ─── b ─┬─ c        nodes 0 1 2 3 4
                   └─ d
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.tree import Rows, TokenTree


def hung_below(root: Tensor, chain: Sequence[int], tree: TokenTree) -> TokenTree:
    """The tree below the last token of a chain, which hangs below the root.

    The chain's nodes have no draws. root: [1] int64. chain: n ≥ 1 tokens; the tree's root carries
    the last one.
    """
    # 1. The chain's nodes come first.
    n, device = len(chain), tree.tokens.device
    nodes = torch.arange(n, device=device)
    tokens = torch.cat([root.to(device), tree.tokens.new_tensor(chain[:-1]), tree.tokens])
    parents = torch.cat([nodes - 1, tree.parents + n])
    depth = torch.cat([nodes, tree.depth + n])
    chained = pad(nodes[:, None] >= nodes, (0, len(tree.tokens)))
    ancestors = torch.cat([chained, pad(tree.ancestors, (n, 0), value=True)])

    # 2. Laws and draws move with their nodes. Extra rows see the chain as they see the text.
    drafts, rows = tree.drafts, tree.rows
    if drafts:
        drafts = replace(drafts, nodes=drafts.nodes + n)
    if rows:
        rows = Rows(rows.tokens, rows.depth + n, pad(rows.mask, (n, 0), value=True), rows.asked)
    return TokenTree(tokens, parents, depth, ancestors, drafts, rows)
