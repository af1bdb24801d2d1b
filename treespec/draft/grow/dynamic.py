"""Growing EAGLE-2's tree (`treespec.trees.dynamic`), a level at a time.

Candidates are numbered level by level; the root is 0.
"""

from typing import final

import torch
from torch import Tensor

from treespec.draft.grow.grower import Grower
from treespec.draft.grow.growth import Growth
from treespec.draft.proposer import Frontier
from treespec.shaping.sampling import SamplingParams, largest
from treespec.trees.dynamic import DynamicTree
from treespec.trees.mask import ancestor_mask
from treespec.trees.ranked import best_first, connect
from treespec.trees.tree import TokenTree


@final
class DynamicGrower(Grower[DynamicTree]):
    """Grows dynamic trees."""

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        return grow_dynamic(root, logits, self.policy)


def grow_dynamic(root: Tensor, logits: Tensor, tree: DynamicTree) -> Growth:
    """The growth of a dynamic tree.

    root: [1] int64. logits: [1, V] draft logits of its children.
    """
    # 1. The root is candidate 0.
    device = logits.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, parents, depths, scores = [root], [zero], [zero], []
    frontier = zero  # [F] candidate numbers
    above = zero.float()  # [F] log-probabilities of the paths to them
    count = 1
    for level in range(1, tree.depth + 1):
        # 2. The likeliest children of each frontier node are candidates.
        children, path_scores = expand(above, logits, tree.topk)  # [F, K]
        width = children.numel()
        tokens.append(children.flatten())
        parents.append(frontier.repeat_interleave(children.shape[1]))
        depths.append(torch.full((width,), level, device=device))
        scores.append(path_scores.flatten())

        # 3. The likeliest of them are the next frontier.
        if level < tree.depth:
            best = best_first(scores[-1], tree.topk)
            frontier, above = count + best, scores[-1][best]
            count += width
            logits = yield Frontier(tokens[-1][best], best // children.shape[1])

    # 4. Keep the likeliest of all candidates. No child is likelier than its parent, and of equals
    #    the parent comes first, so a kept node's parent is kept.
    kept = 1 + best_first(torch.cat(scores), tree.nodes - 1)
    kept = torch.cat([zero, kept.sort().values])
    links, depth = connect(kept, torch.cat(parents)), torch.cat(depths)[kept]
    return TokenTree(torch.cat(tokens)[kept], links, depth, ancestor_mask(links, tree.depth))


def expand(scores: Tensor, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The likeliest children of each frontier node, K = min(topk, V) of them.

    scores: [F] log-probabilities of the paths to the nodes. logits: [F, V] draft logits.
    Returns the children's tokens [F, K] int64 and the log-probabilities [F, K] of their paths.
    """
    alike = len(logits) > 1 and logits.stride(0) == 0  # one law for all nodes of the level
    law = (logits[:1] if alike else logits).float().log_softmax(-1)
    best, tokens = largest(law, min(topk, law.shape[-1]))
    return tokens.expand(len(logits), -1), scores[:, None] + best
