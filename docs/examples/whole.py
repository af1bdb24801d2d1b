"""A verifier of your own that looks at a whole chain of drafts: block verification (Sun et al. 2024)."""

import sys

import torch
from torch.nn.functional import pad

from treespec.sampling.probs import sample
from treespec.verify.single import Single
from treespec.verify.topk import TopK
from treespec.verify.verdict import Verdict, as_step, finish_step
from treespec.verify.walk import Walk


class Whole:
    name = "whole"
    scheme = Single()  # it makes the draws: one a node, so the trees are chains
    coupled = False  # tokens do not follow from noise of their positions

    def __call__(self, tree, p, generator):  # on a CPU
        return finish_step(as_step(self.verify_on_device(tree, p, generator)))

    def verify_on_device(self, tree, p, generator):
        if tree.drafts is None:  # temperature 0: the most likely tokens
            return (yield from Walk(TopK()).verify_on_device(tree, p, generator))

        # 1. The weight of the path down to each of the N nodes.
        p = p[:]  # [N, V]
        q = pad(tree.drafts.q, (0, 0, 0, 1))  # below the last node nothing is drawn
        tokens = tree.tokens[1:]
        weights = [torch.ones_like(p[0, 0])]
        for ratio in (p[:-1] / q[:-1]).gather(1, tokens[:, None]).flatten():
            weights.append((weights[-1] * ratio).clamp(max=1))
        weight = torch.stack(weights)[:, None]

        # 2. Whether the path may end there, and the token that would follow.
        residual = (weight * p - q).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        chance = mass / (mass + 1 - weight).clamp(min=1e-30)
        chance[0] = 1  # the root is always kept
        uniform = torch.empty_like(chance).uniform_(generator=generator)
        may_end = (uniform < chance).flatten()
        output = sample(torch.where(mass > 0, residual, p), generator)

        # 3. The deepest of these nodes. `yield` is the one wait for a GPU: what comes back lies on the host.
        numbers = yield torch.cat([may_end.long(), tokens, output])
        may_end, tokens, output = numbers.split([len(p), len(tokens), len(p)])
        end = int(may_end.nonzero().max())
        return Verdict(list(range(1, end + 1)), [*tokens[:end].tolist(), int(output[end])])


if __name__ == "__main__":
    from treespec import load
    from treespec.verify.conformance import check
    from treespec.verify.conformance_verifiers import build_verifier_judge

    print(check(build_verifier_judge(Whole()), (1, 1), runs=100))
    spec = load(*sys.argv[1:3]).configured("chain:3", Whole())
    print(spec.generate("Once upon a time", temperature=1.0, max_new_tokens=32, seed=0))
