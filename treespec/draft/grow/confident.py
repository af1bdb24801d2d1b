"""Growing a chain that ends where the draft is unsure (`treespec.trees.confident`).

The host waits once a level.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.grow.grower import Grower, Means
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.static import draft_laws, stack
from treespec.draft.proposer import Frontier
from treespec.shaping.sampling import SamplingParams
from treespec.trees.confident import ConfidentChain
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.scheme import Scheme


@final
class ConfidentGrower(Grower[ConfidentChain]):
    """Grows the chains of one text.

    threshold, rate: the text's γ and α. levels: drafted tokens of the chain under verification.
    """

    def __init__(self, policy: ConfidentChain, means: Means) -> None:
        super().__init__(policy, means)
        self.threshold, self.rate, self.levels = policy.threshold, 0.0, 0

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        scheme, depth = self.means.scheme_at(params), self.policy.depth
        growth = grow_confident(root, logits, depth, self.threshold, scheme, params, generator)
        chain = yield from growth
        self.levels = len(chain.tokens) - 1
        return chain

    def feedback(self, path: Sequence[int]) -> None:
        if self.levels:
            updated = self.policy.update(self.threshold, self.rate, len(path), self.levels)
            self.threshold, self.rate = updated
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
    """The growth of a confident chain.

    root: [1] int64. logits: [1, V] draft logits of its child.
    threshold: γ. A token's confidence is its probability at temperature 1, as in the paper.
    """
    tokens, laws, draws = [root], [], []
    for level in range(1, depth + 1):
        # 1. Draw the next token.
        q = logits if scheme.deterministic else draft_laws(logits, scheme, params, 1)
        drawn = scheme.draw(q, 1, generator)
        laws.append(q)
        draws.append(drawn)
        tokens.append(drawn.tokens[:, 0])

        # 2. Stop below an unsure token, which stays in the chain.
        last = tokens[-1].clamp_min(0)
        if level == depth or not float(logits.float().softmax(-1)[0, last]) >= threshold:
            break
        logits = yield Frontier(last, torch.zeros_like(last))

    # 3. The chain as a tree.
    number = torch.arange(len(tokens), device=logits.device)
    ancestors = number[:, None] >= number
    drafts = None if scheme.deterministic else Drafts(number[:-1], torch.cat(laws), stack(draws))
    return TokenTree(torch.cat(tokens), number - 1, number, ancestors, drafts)
