"""Is a verifier exact? transformers' own, with drafts that were drawn, and with the most likely tokens."""

from transformers.generation.utils import _speculative_sampling as theirs

from treespec.verify.conformance import check


def chain(p, q, tokens, parents):  # a chain, one q for each drafted token
    n = len(tokens) - 1
    kept, matches = theirs(tokens[None, 1:], q[None, :-1].log(), n, p[None].log())
    return kept[0, : int(matches) + 1].tolist()


print(check(chain, (1, 1), runs=200))
print(check(chain, (1, 1), draws="greedy", runs=200))
