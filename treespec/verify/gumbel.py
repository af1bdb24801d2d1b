"""Sampling by Gumbel noise that target and drafts share: one seed gives one text, whatever is drafted.

The output at a position is the token with the largest log p + noise, and a draft's children are the tokens
with the largest log q + the same noise (`treespec.sampling.noise`). The output is a function of the target
and the noise alone. So a tree may be any function of q and of the noise, pruned and reranked as at temperature 0,
and the text is the same as without drafts. Five tokens, and the logits of q and p with one noise added:

    q + noise      .3   .9   1.4  .2   -.5      draws 2 and 1, a tree of the top two
    p + noise      .1   1.2  .8   .6   -.1      output 1: it is a draw, so it is accepted

Sources: Daliri, Musco and Suresh 2024, Coupling without Communication and Drafter-Invariant Speculative Decoding
(2408.07978), for one draft; Rowan, Phan and Khisti 2025 (2506.05632) for lists of drafts with independent noise. Here
a list is the top k under a single noise.
"""

from treespec.verify.topk import TopK
from treespec.verify.walk import Walk

GUMBEL_VERIFIER = Walk(TopK(), "gumbel", coupled=True)
AUTO_VERIFIER = Walk(
    TopK(), "auto", coupled=True
)  # the default: its trees are chosen by their cost
