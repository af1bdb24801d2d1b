"""A drafter without a helper: a subclass of `Drafter` that drafts the last token once more."""

import sys
import time

import torch

from treespec import Spec, load
from treespec.draft.drafter import Drafter
from treespec.trees.tree import TokenTree


class Again(Drafter):
    one_hot = True  # its tokens have no draft distribution, so it goes with --verifier topk
    per_text = ("cycles",)  # lists with one entry a text; texts come and go in them

    def __init__(self):
        self.cycles = [0]  # of each text; one text at first

    def draft_trees(self, roots, distributions, generators, cache, now=time.perf_counter):
        return [self.tree(root) for root in roots]  # roots: [B] the last token of each text

    def tree(self, root):
        nodes = torch.arange(2, device=root.device)
        ancestors = torch.ones(2, 2, dtype=torch.bool, device=root.device).tril()
        return TokenTree(root.repeat(2), parents=nodes - 1, depth=nodes, ancestors=ancestors)

    def settle(self, paths, outs):  # after each cycle: the accepted nodes, the target's output
        self.cycles = [n + 1 for n in self.cycles]

    def observe(self, features, tokens):
        """Each text grew by n positions: their features, and n + 1 tokens. It reads neither."""

    def rewind(self, lengths):
        """Each text keeps its first `lengths` positions."""


spec = Spec(load(sys.argv[1]).target, Again(), verifier="topk")
for answer in spec.generate(["One", "Two"], max_new_tokens=32):
    print(answer)
