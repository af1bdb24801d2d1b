"""EAGLE-2's tree, a level at a time. Candidates are numbered level by level, the root being 0."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.grow.grower import DraftModel, Grower, check_depth, check_one_law, check_width
from treespec.draft.grow.growth import Growth
from treespec.draft.proposer import Frontier
from treespec.errors import InputError
from treespec.sampling import SamplingParams, largest
from treespec.trees.dynamic import DynamicTree, best_first, connect
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree
from treespec.verify.scheme import Scheme


@final
class DynamicGrower(Grower[DynamicTree]):
    @staticmethod
    def fits(policy: DynamicTree, scheme: Scheme, model: DraftModel) -> None:
        """Keeping nodes by what was drafted is harmless only where the draws are a function of q."""
        check_one_law(model)
        if not scheme.deterministic:
            raise InputError(
                f"the dynamic tree cannot go with verifier {scheme.name}: it keeps children by the probability of "
                "what was drawn, which biases sampled draws; take --tree eagle (or another static tree), "
                "or --verifier topk"
            )
        check_width(policy.topk, scheme)
        check_depth(policy.max_depth, model, "dynamic:depth=")

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        return grow_dynamic(root, logits, self.policy)


def grow_dynamic(root: Tensor, logits: Tensor, tree: DynamicTree) -> Growth:
    """root: [1] int64. logits: [1, V] draft logits of its children."""
    device = logits.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, parents, depths, scores = [root], [zero], [zero], []
    frontier, above = (
        zero,
        zero.float(),
    )  # candidate numbers and path log-probabilities of the frontier
    count = 1
    for level in range(1, tree.depth + 1):
        children, path_scores = expand(above, logits, tree.topk)  # [F, K]
        width = children.numel()
        tokens.append(children.flatten())
        parents.append(frontier.repeat_interleave(children.shape[1]))
        depths.append(torch.full((width,), level, device=device))
        scores.append(path_scores.flatten())
        if level < tree.depth:
            best = best_first(scores[-1], tree.topk)
            frontier, above = count + best, scores[-1][best]
            count += width
            logits = yield Frontier(tokens[-1][best], best // children.shape[1])
    kept = 1 + best_first(torch.cat(scores), tree.nodes - 1)
    kept = torch.cat([zero, kept.sort().values])
    links = connect(kept, torch.cat(parents))
    return TokenTree(
        torch.cat(tokens)[kept], links, torch.cat(depths)[kept], ancestor_mask(links, tree.depth)
    )


def expand(scores: Tensor, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The likeliest children of each frontier node.

    scores: [F] log-probability of the path to each node. logits: [F, V] draft logits.
    Returns tokens [F, K] int64 and the log-probabilities [F, K] of the paths to them, K = min(topk,
    V).
    """
    law = logits.float().log_softmax(-1)
    best, tokens = largest(law, min(topk, law.shape[-1]))
    return tokens, scores[:, None] + best
