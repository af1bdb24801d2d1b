"""Continuations of a text, merged into a token tree."""

import numpy as np
import torch

from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree, best_first, connect


def trie(
    root: int, continuations: np.ndarray, nodes: int, weights: np.ndarray | None = None
) -> TokenTree:
    """The tree of the `nodes` heaviest prefixes of continuations, the root included.

    continuations: [M, L] int64 tokens after the root, -1 after the end of a shorter one. weights:
    [M], default equal. A node's weight is the sum over the continuations through it, so no node
    outweighs its parent, and the heaviest nodes form a tree. Ties go to the shallower node, then to
    the first:

        a b
        c         root ─┬─ a 3 ─┬─ b 2
        a b             │       └─ d 1      4 nodes: root, a, b, c
        a d             └─ c 1
    """
    # 1. The prefixes, a level at a time: prefixes below one parent with one token are one node.
    mass = np.ones(len(continuations)) if weights is None else weights
    above = np.zeros(len(continuations), dtype=np.int64)  # [M] deepest node of each continuation
    tokens, parents = [np.array([root])], [np.array([-1])]
    scores, depth = [np.array([np.inf])], [0]
    count = 1
    for level in range(continuations.shape[1]):
        going = continuations[:, level] >= 0
        continuations, above, mass = continuations[going], above[going], mass[going]
        if not len(continuations):
            break
        here = continuations[:, level]
        prefix = above * (here.max() + 1) + here
        _, first, group = np.unique(prefix, return_index=True, return_inverse=True)
        order = first.argsort()
        tokens.append(here[first[order]])
        parents.append(above[first[order]])
        place = order.argsort()[group]
        scores.append(np.bincount(place, weights=mass))
        depth += [level + 1] * len(first)
        above, count = count + place, count + len(first)

    # 2. The heaviest of them, as a tree.
    kept = best_first(torch.from_numpy(np.concatenate(scores)), nodes).sort().values
    links = connect(kept, torch.from_numpy(np.concatenate(parents)))
    ancestors = ancestor_mask(links, depth[-1])
    chosen = torch.from_numpy(np.concatenate(tokens))[kept]
    return TokenTree(chosen, links, torch.tensor(depth)[kept], ancestors)
