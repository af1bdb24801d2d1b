"""On from a verdict along given tokens, which stand in the tree beside the drafted ones.

A lossless verifier's verdict has the target's law if the target samples all that follows it. The
logits after a given token that equals the verdict's last one are there already. So the target's own
sample from them is the next token, which may be a given child again, and so on. This holds for every
lossless verifier, whatever it did with the drafted nodes, because the given tokens depend on the
past alone.
"""

from typing import final

import torch
from torch import Tensor

from treespec.sampling import Logits, TargetLaws, sample
from treespec.trees.tree import TokenTree
from treespec.verify.walk import Verdict, Verifier, children_by_token


@final
class FirstRows:
    """The first rows of [N, V] logits."""

    def __init__(self, logits: Logits, count: int) -> None:
        self.logits, self.count = logits, count

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            rows = slice(*rows.indices(self.count))
        return self.logits[rows]

    def __len__(self) -> int:
        return self.count

    @property
    def device(self) -> torch.device:
        return self.logits.device


def ridden(
    verifier: Verifier, tree: TokenTree, p: TargetLaws, generator: torch.Generator
) -> Verdict:
    """The verdict on the drafted nodes, continued along the tree."""
    # 1. The drafted nodes.
    count = len(tree.tokens) - tree.added
    drafted = TargetLaws(FirstRows(p.logits, count), p.params)
    verdict = verifier(tree.drafted(), drafted, generator)

    # 2. On a device the host waits once: all given nodes are sampled together.
    choices: list[int] | None = None
    if p.device.type != "cpu":
        choices = sample(p[count:], generator).tolist()

    # 3. From the verdict's end, while its last token is a child.
    child_of, path, tokens = children_by_token(tree), [*verdict.path], [*verdict.tokens]
    while True:
        node = child_of.get((path[-1] if path else 0, tokens[-1]))
        if node is None or node < count:
            return Verdict(path, tokens)
        path.append(node)
        tokens.append(
            choices[node - count] if choices else int(sample(p[node : node + 1], generator))
        )
