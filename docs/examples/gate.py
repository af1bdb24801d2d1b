"""A head of your own: for each token ahead a gate on the target's hidden state, and an output layer."""

import sys

import torch
from torch import nn

from treespec.draft.heads.base import AtOnceProposer
from treespec.heads.medusa import DepthHeads


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)  # at first half of the state passes
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):  # [..., H] -> [..., H]
        return x * torch.sigmoid(self.linear(x))


class GateHead(DepthHeads):
    """Three heads: head i, from 0, drafts the token at depth i + 1 from one hidden state."""

    kind = "gate"  # its name in the tables, and the model_type in its config.json
    name = "gate"  # the prefix of its fields: gate_num_heads
    known_as = "a gate head"
    new_heads = 3

    def __init__(self, config):
        super().__init__(config)
        for i in range(self.max_depth):
            output = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
            self.add_module(str(i), nn.Sequential(Gate(self.hidden_size), output))

    def list_modules(self, i):
        return list(self.get_submodule(str(i)).children())

    def forward(self, tokens, features, counts, steps, embed=None):
        """The states [M, H] of each draft step, at the wanted rows: for training, all positions at once."""
        rows = features.shape[1]  # features: [B, R, H], counts: [B, R] bool
        states = []
        for i in range(min(steps, self.max_depth)):
            inputs = features[:, : max(0, rows - i)][counts[:, i:]]
            states.append(self.compute_hidden(i, inputs))
        return states


class GateProposer(AtOnceProposer):
    """Drafts all levels from the last hidden state of each sequence."""

    def draft_all_levels(self, last):  # last: [B, H] -> [B, D, V] draft logits
        levels = range(self.head.max_depth)
        return torch.stack([self.head.compute_step_logits(i, last) for i in levels], dim=1)


if __name__ == "__main__":
    from treespec import Spec, load

    target = load(sys.argv[1]).target
    head = GateHead(GateHead.build_config(target)).to(target.dtype)  # not trained yet
    spec = Spec(target, GateProposer(head, target), "2x2", "rrs")
    print(spec.generate("Once upon a time", max_new_tokens=32))
