"""Forced tokens: those that a text's law leaves no choice about, as a chain above the drafted tree."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from treespec.draft.grow.growth import Growth
from treespec.draft.grow.static import stack, table
from treespec.draft.proposer import Frontier
from treespec.trees.chain import hung_below
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.scheme import Scheme


def with_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """A tree with forced tokens above it (`treespec.trees.chain`).

    A forced token is a draw from a one-hot law, so every verifier answers it as any other draw.
    root: [1] int64. chain: n tokens; the tree's root carries the last one. scheme: of the draws.
    """
    # 1. Without laws, the children are a function of the text anyway.
    hung = hung_below(root, chain, tree)
    drafts = hung.drafts
    if drafts is None:
        return hung

    # 2. The draws at the chain's nodes.
    q = one_hot(tree.tokens.new_tensor(chain), drafts.q.shape[-1]).to(drafts.q)  # [n, V]
    q = q[:, None] if drafts.q.dim() == 3 else q
    drawn = scheme.draw(q, 1, generator)
    if drafts.draws.sure is not None and drawn.sure is None:
        drawn = replace(drawn, sure=torch.zeros_like(drawn.tokens, dtype=torch.bool))

    # 3. They stand before the tree's.
    nodes = torch.cat([torch.arange(len(chain), device=drafts.nodes.device), drafts.nodes])
    laws = table([q, drafts.q]) if q.dim() == 3 else torch.cat([q, drafts.q])
    return replace(hung, drafts=Drafts(nodes, laws, stack([drawn, drafts.draws])))


def in_drafts(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """[n] the draft tokens of a chain; None where one of them is not in the draft vocabulary [N]."""
    tokens = torch.tensor(chain, dtype=torch.int64, device=device)
    if vocabulary is None:
        return tokens
    places = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    return places if torch.equal(vocabulary[places], tokens) else None


def below_chain(chain: Tensor, grow: Callable[[Tensor], Growth], logits: Tensor) -> Growth:
    """The growth that `grow` begins below a chain, along which the draft model steps first.

    chain: [n] draft tokens. logits: [1, N] draft logits below the root.
    """
    first_row = chain.new_zeros(1)
    for token in chain.split(1):
        logits = yield Frontier(token, first_row)
    return (yield from grow(logits))
