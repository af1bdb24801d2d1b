"""A drafter without a helper: a subclass of `Drafter` that drafts the last token once more."""

import sys
import time

import torch

from treespec import Spec, load
from treespec.draft.drafter import Drafter
from treespec.trees.tree import TokenTree


class Again(Drafter):
    one_hot = True  # its tokens have no draft distribution, so it goes with --verifier topk
    taps = ()  # it reads no layer of the target
    per_text = ("observed",)  # lists with one entry a text; texts come and go in them

    def __init__(self):
        self.observed = [0]  # positions, by text; one text at first

    @property
    def lengths(self):
        return self.observed

    def draft_trees(self, roots, distributions, generators, cache, now=time.perf_counter):
        return [self.tree(root) for root in roots]  # roots: [B] the last token of each text

    def tree(self, root):
        nodes = torch.arange(2, device=root.device)
        ancestors = torch.ones(2, 2, dtype=torch.bool, device=root.device).tril()
        return TokenTree(root.repeat(2), parents=nodes - 1, depth=nodes, ancestors=ancestors)

    def observe(self, features, tokens):  # of each text n positions, and the token after them
        self.observed = [n + len(new) - 1 for n, new in zip(self.observed, tokens, strict=True)]

    def settle(self, paths, outs):
        """Called after each cycle with the accepted nodes. This drafter does not learn."""

    def rewind(self, lengths):
        self.observed = list(lengths)


spec = Spec(load(sys.argv[1]).target, Again(), verifier="topk")
for answer in spec.generate(["One", "Two"], max_new_tokens=32):
    print(answer)
