"""A chain that ends where the draft is unsure (`treespec.trees.confident`); the host waits once a level."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.grow.growth import Growth
from treespec.draft.grow.static import draft_laws, stack
from treespec.draft.proposer import Frontier
from treespec.sampling import SamplingParams
from treespec.trees.confident import ConfidentChain
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.scheme import Scheme


@final
class Confidence:
    """What drafts of one text must be sure of, by how many were accepted so far."""

    def __init__(self, chain: ConfidentChain) -> None:
        self.chain, self.threshold, self.rate = chain, chain.threshold, 0.0
        self.levels = 0  # of the chain that is being verified

    def settle(self, path: Sequence[int]) -> None:
        """A cycle has ended. path: the accepted nodes, without the root."""
        if self.levels:
            self.threshold, self.rate = self.chain.update(self.threshold, self.rate, len(path), self.levels)
        self.levels = 0


def grow_confident(
    root: Tensor,
    logits: Tensor,
    depth: int,
    threshold: float,
    scheme: Scheme,
    params: SamplingParams,
    generator: torch.Generator,
) -> Growth:
    """root: [1] int64. logits: [1, V] draft logits of its child. Confidence is at temperature 1, as published."""
    tokens, laws, draws = [root], [], []
    for level in range(1, depth + 1):
        q = logits if scheme.deterministic else draft_laws(logits, scheme, params, 1)
        drawn = scheme.draw(q, 1, generator)
        laws.append(q)
        draws.append(drawn)
        tokens.append(drawn.tokens[:, 0])
        last = tokens[-1].clamp_min(0)
        if level == depth or not float(logits.float().softmax(-1)[0, last]) >= threshold:
            break
        logits = yield Frontier(last, torch.zeros_like(last))
    number = torch.arange(len(tokens), device=logits.device)
    ancestors = number[:, None] >= number
    drafts = None if scheme.deterministic else Drafts(number[:-1], torch.cat(laws), stack(draws))
    return TokenTree(torch.cat(tokens), number - 1, number, ancestors, drafts)
