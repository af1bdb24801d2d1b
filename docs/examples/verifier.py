"""A scheme of your own: one draw a node, accepted with min(1, p/q)."""

import sys

import torch

from treespec.trees.tree import Draws
from treespec.verify.scheme import Scheme


class Mine(Scheme):
    name = "mine"
    lossless = True  # checked below
    deterministic = False  # the draws are random
    random_draws = "independent"  # each from q: so α* and the bound of the draws are known
    max_draws = 1

    def draw(self, q, k, generator):  # q: [B, V] probabilities
        return Draws(torch.multinomial(q, 1, generator=generator))

    def plan(self, p, q, draws):  # [B, V]: the distribution of the output token, given the draw
        accept = (p / q).gather(1, draws.tokens).clamp(max=1)  # [B, 1]
        residual = (p - q).clamp(min=0)
        residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-30)
        return ((1 - accept) * residual).scatter_add(1, draws.tokens, accept)

    def acceptance_rate(self, p, q, k):  # [B], or None where no formula is known
        return torch.minimum(p, q).sum(-1)


if __name__ == "__main__":
    from treespec import load
    from treespec.verify.conformance_schemes import check_scheme
    from treespec.verify.walk import Walk

    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.3, 0.3, 0.4]])
    output = sum(q[0, x] * Mine().plan(p, q, Draws(torch.tensor([[x]]))) for x in range(3))
    torch.testing.assert_close(output, p)  # the one rule: over all draws, the plan gives p
    print(check_scheme(Mine(), rows=1000))  # the same on many small p and q

    spec = load(*sys.argv[1:3]).configured("chain:3", Walk(Mine()))
    print(spec.generate("Once upon a time", temperature=1.0, max_new_tokens=32, seed=0))
