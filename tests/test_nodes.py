"""Trees that grow by levels: what is kept keeps its tokens, depths and ancestors."""

import pytest
import torch

from treespec.draft.grow.growth import Nodes
from treespec.trees.mask import ancestor_mask


def depth_first(parents: list[int], kept: set[int], node: int = 0) -> list[int]:
    """The kept nodes from `node` down, a branch after the other."""
    below = [child for child, parent in enumerate(parents) if parent == node and child in kept]
    return [node, *(one for child in below for one in depth_first(parents, kept, child))]


@pytest.mark.parametrize("deep_first", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_tree_of_kept_nodes_is_the_whole_one_without_the_others(seed: int, deep_first: bool) -> None:
    """Each level hangs below some nodes of the one above; a node's token says its number."""
    generator = torch.Generator().manual_seed(seed)
    nodes, above = Nodes(torch.tensor([1000])), torch.zeros(1, dtype=torch.int64)
    for width in torch.randint(1, 7, (4,), generator=generator).tolist():
        added = nodes.count + torch.arange(width)
        nodes.add(1000 + added, above[torch.randint(len(above), (width,), generator=generator)])
        above = added
    whole = nodes.tree()
    assert whole.tokens.tolist() == list(range(1000, 1000 + nodes.count))
    assert torch.equal(whole.ancestors, ancestor_mask(whole.parents, 4))
    lost = torch.rand(nodes.count, generator=generator) < 0.3
    lost[0] = False
    kept = (~(whole.ancestors & lost).any(1)).nonzero()[:, 0]  # with all that is above it
    if deep_first:  # a parent still stands before its children, but the last node may be a shallow one
        kept = torch.tensor(depth_first(whole.parents.tolist(), set(kept.tolist())))
    part = nodes.tree(kept)
    assert torch.equal(part.tokens, 1000 + kept)
    assert torch.equal(part.depth, whole.depth[kept])
    assert torch.equal(part.ancestors, whole.ancestors[kept][:, kept])
    assert torch.equal(part.ancestors, ancestor_mask(part.parents, 4))


def test_a_root_alone_is_a_tree() -> None:
    tree = Nodes(torch.tensor([7])).tree()
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()) == ([7], [-1], [0])
    assert tree.ancestors.tolist() == [[True]]
