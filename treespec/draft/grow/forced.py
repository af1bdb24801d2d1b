"""Forced tokens: those that a text's law leaves no choice about, as a chain above the drafted tree.

A root r, the forced tokens a b, and a tree that was drafted below b:

    r ─── a ─── b ─┬─ c        nodes 0 1 2 3 4
                   └─ d
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from treespec.draft.grow.growth import Growth
from treespec.draft.grow.static import stack, table
from treespec.draft.proposer import Frontier
from treespec.trees.tree import Drafts, Rows, TokenTree
from treespec.verify.scheme import Scheme


def in_drafts(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """[n] the draft tokens of a chain; None where one of them is not in the draft vocabulary."""
    tokens = torch.tensor(chain, dtype=torch.int64, device=device)
    if vocabulary is None:
        return tokens
    places = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    return places if torch.equal(vocabulary[places], tokens) else None


def with_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """A tree with a chain above it.

    root: [1] int64. tree: its root carries the chain's last token. scheme: of the tree's draws. A
    forced token is its draw from a one-hot law, so every verifier answers it as any other draw.
    """
    # 1. The chain's nodes come first.
    n, device = len(chain), tree.tokens.device
    nodes = torch.arange(n, device=device)
    tokens = torch.cat([root.to(device), tree.tokens.new_tensor(chain[:-1]), tree.tokens])
    parents = torch.cat([nodes - 1, tree.parents + n])
    depth = torch.cat([nodes, tree.depth + n])
    chained = pad(nodes[:, None] >= nodes, (0, len(tree.tokens)))
    ancestors = torch.cat([chained, pad(tree.ancestors, (n, 0), value=True)])

    # 2. Extra rows see the chain as they see the committed text.
    rows = tree.rows
    if rows:
        seen = pad(rows.mask, (n, 0), value=True)
        rows = Rows(rows.tokens, rows.depth + n, seen, rows.asked)

    # 3. The draws at the chain's nodes, where the tree has draws.
    drafts = tree.drafts
    if drafts:
        q = one_hot(tree.tokens.new_tensor(chain), drafts.q.shape[-1]).to(drafts.q)
        q = q[:, None] if drafts.q.dim() == 3 else q
        drawn = scheme.draw(q, 1, generator)
        if drafts.draws.sure is not None and drawn.sure is None:
            drawn = replace(drawn, sure=torch.zeros_like(drawn.tokens, dtype=torch.bool))
        laws = table([q, drafts.q]) if q.dim() == 3 else torch.cat([q, drafts.q])
        drafts = Drafts(torch.cat([nodes, drafts.nodes + n]), laws, stack([drawn, drafts.draws]))
    return TokenTree(tokens, parents, depth, ancestors, drafts, rows)


def below_chain(chain: Tensor, grow: Callable[[Tensor], Growth], logits: Tensor) -> Growth:
    """The growth that `grow` begins below a chain, along which the draft model steps first.

    chain: [n] draft tokens. logits: [1, N] draft logits below the root.
    """
    first_row = chain.new_zeros(1)
    for token in chain.split(1):
        logits = yield Frontier(token, first_row)
    return (yield from grow(logits))
