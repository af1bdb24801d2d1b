"""Two levels below the roots of texts that are decoded together, by any proposer."""

import torch

from treespec.draft.drafter import Frontier

TEXTS = ([7, 9, 4, 30, 11, 52, 8], [5], [20, 21, 3, 44, 17, 60, 33, 12, 6, 58, 41])  # the last token is the root


def joined(target, proposer, texts=TEXTS):
    """The target's cache of all texts but for their roots, and a proposer that has observed them."""
    caches = []
    proposers = []
    for text in texts:
        cache = target.new_cache(capacity=8)
        one = proposer.new()
        if len(text) > 1:
            features = target.prefill(cache, torch.tensor([text[:-1]]))
            one.observe([features[0]], [torch.tensor(text)])
        caches.append(cache)
        proposers.append(one)
    caches[0].join(caches[1:])
    proposers[0].join(proposers[1:])
    return caches[0], proposers[0]


def level_logits(proposer, cache, texts=TEXTS):
    """(text, drafted tokens, logits) at every node that is reached: the frontiers of the texts differ in width."""
    nodes = [[()] for _ in texts]
    found = []
    logits = proposer.begin(torch.tensor([text[-1] for text in texts]), cache)
    for level, widths in enumerate([(3, 1, 2), (2, 0, 3), ()]):
        for text, paths, rows in zip(texts, nodes, logits, strict=True):
            found += [(text, path, one) for path, one in zip(paths, rows, strict=True)]
        frontiers = []
        for row, width in enumerate(widths):
            above = [(3 * i + 1) % len(nodes[row]) for i in range(width)]
            tokens = [(13 * i + 5 * level + 7 * row) % 60 + 3 for i in range(width)]
            nodes[row] = [(*nodes[row][a], token) for a, token in zip(above, tokens, strict=True)]
            frontiers.append(Frontier(torch.tensor(tokens), torch.tensor(above)) if width else None)
        logits = proposer.extend(frontiers) if widths else []
    return found


def contents(cache):
    """What of a cache may not change while drafts are made."""
    kept = [
        (layer.length, *(states[row, :, :n].clone() for states in layer.storage for row, n in enumerate(cache.lengths)))
        for layer in cache.tree_layers
    ]
    return list(cache.lengths), kept


def same(before, after):
    lengths, layers = before
    return lengths == after[0] and all(
        a[0] == b[0] and all(map(torch.equal, a[1:], b[1:])) for a, b in zip(layers, after[1], strict=True)
    )
