"""Given tokens in a tree that a draft model has drafted.

Tokens that both have share a node. The others stand behind the drafted nodes:

    drafted   0 ─┬─ a: 1 ─── c: 3        given   0 ─── a ─┬─ c ─── e
                 └─ b: 2                                  └─ d

    merged    0 ─┬─ a: 1 ─┬─ c: 3 ─── e: 4        2 added nodes
                 │        └─ d: 5
                 └─ b: 2
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from treespec.trees.tree import TokenTree
from treespec.verify.walk import children_by_token


def merged(tree: TokenTree, given: TokenTree, above: int = 0) -> TokenTree:
    """A drafted tree with given tokens below one of its nodes.

    tree: without extra rows. given: on the host, without laws; its root stands for node `above`.
    """
    # 1. The place of each given node: a drafted node, or a new one behind all.
    nodes, child_of = len(tree.tokens), children_by_token(tree)
    places, tokens, parents = [above], list[int](), list[int]()
    links = zip(given.tokens.tolist()[1:], given.parents.tolist()[1:], strict=True)
    for token, parent in links:
        place = child_of.get((places[parent], token))
        if place is None:
            place = nodes + len(tokens)
            tokens.append(token)
            parents.append(places[parent])
        places.append(place)
    if not tokens:
        return tree

    # 2. Their depths and ancestors.
    device, count = tree.tokens.device, len(tokens)
    depth, ancestors = pad(tree.depth, (0, count)), pad(tree.ancestors, (0, count, 0, count))
    for node, parent in enumerate(parents, start=nodes):
        depth[node] = depth[parent] + 1
        ancestors[node] = ancestors[parent]
        ancestors[node, node] = True
    return replace(
        tree,
        tokens=torch.cat([tree.tokens, torch.tensor(tokens, device=device)]),
        parents=torch.cat([tree.parents, torch.tensor(parents, device=device)]),
        depth=depth,
        ancestors=ancestors,
        added=count if tree.drafts else 0,
    )
