"""Trees that are settled on the host: what is kept keeps its tokens, depths and ancestors."""

import numpy as np
import pytest
import torch

from treespec.draft.grow.nodes import Nodes
from treespec.trees.mask import ancestor_mask


def grown(generator: np.random.Generator, levels: int = 4) -> Nodes:
    """Each level hangs below some of the one above; a node's token says its number."""
    nodes, above = Nodes(torch.tensor([1000])), np.zeros(1, dtype=np.int64)
    for _ in range(levels):
        first, width = nodes.count, int(generator.integers(1, 7))
        nodes.add(1000 + first + np.arange(width), generator.choice(above, width))
        above = first + np.arange(width)
    return nodes


def depth_first(parents: np.ndarray, kept: set[int], node: int = 0) -> list[int]:
    """The kept nodes from `node` down, a branch after the other."""
    below = [child for child in np.flatnonzero(parents == node).tolist() if child in kept]
    return [node, *(one for child in below for one in depth_first(parents, kept, child))]


@pytest.mark.parametrize("deep_first", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_tree_of_kept_nodes_is_the_whole_one_without_the_others(seed: int, deep_first: bool) -> None:
    generator = np.random.default_rng(seed)
    nodes = grown(generator)
    whole = nodes.tree()
    assert whole.tokens.tolist() == list(range(1000, 1000 + nodes.count))
    assert torch.equal(whole.ancestors, ancestor_mask(whole.parents, 4))
    lost = generator.random(nodes.count) < 0.3
    lost[0] = False
    kept = np.flatnonzero(~(whole.ancestors.numpy() & lost).any(1))  # with all that is above it
    if deep_first:  # a parent still stands before its children, but the last node may be a shallow one
        kept = np.array(depth_first(whole.parents.numpy(), set(kept.tolist())))
    part = nodes.tree(kept)
    assert part.tokens.tolist() == (1000 + kept).tolist()
    assert torch.equal(part.depth, whole.depth[kept])
    assert torch.equal(part.ancestors, whole.ancestors[kept][:, kept])
    assert torch.equal(part.ancestors, ancestor_mask(part.parents, 4))


def test_a_root_alone_is_a_tree() -> None:
    tree = Nodes(torch.tensor([7])).tree()
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()) == ([7], [-1], [0])
    assert tree.ancestors.tolist() == [[True]]
