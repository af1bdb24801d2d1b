"""A drafter of your own: what followed the last token where it last stood before."""

import sys

import numpy as np
import torch

from treespec import Spec, load
from treespec.draft.model_free.one_hot import OneHotDrafter, TextDrafter
from treespec.trees.tree import TokenTree


class Echo(TextDrafter):
    def __init__(self, length):
        self.length = length

    def draft(self, text, generator):  # text: [T] token ids, the last one is the tree's root
        before = np.flatnonzero(text[:-1] == text[-1])
        end = before[-1] + 1 if len(before) else len(text)
        tokens = torch.tensor([text[-1], *text[end : end + self.length]])  # a chain below the root
        nodes = torch.arange(len(tokens))
        ancestors = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        return TokenTree(tokens, parents=nodes - 1, depth=nodes, ancestors=ancestors)


if __name__ == "__main__":
    spec = Spec(load(sys.argv[1]).target, OneHotDrafter(Echo(8), "echo"), verifier="topk")
    print(spec.generate("Once upon a time", max_new_tokens=32))
