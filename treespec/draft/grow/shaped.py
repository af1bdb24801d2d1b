"""Growth under a sequence's logits processors: draft logits that they change, each row by its node's path, and
forced tokens, which they leave no choice about, as a chain above the drafted tree.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from treespec.draft.drafter import Drafter
from treespec.draft.grow.growth import drafts_of
from treespec.draft.vocabulary import spread
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution, Path
from treespec.trees.tree import TokenTree, hung_below
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


def shape_drafts(
    by: Distribution, paths: Sequence[Path], logits: Tensor, vocabulary: Tensor | None, size: int
) -> Tensor:
    """Draft logits as the target's are shaped, over a draft vocabulary of N tokens or all V = `size`.

    A row whose tokens are all forbidden keeps its logits: its draws must come from some distribution,
    and the target refuses them all. paths: F, in the target's tokens. logits: [F, N], or
    [F, M, N] of M draft models. vocabulary: [N] the target's tokens.
    """
    # 1. One row a path, over all V tokens.
    rows, each = logits if logits.dtype == torch.float64 else logits.float(), list(paths)
    if logits.dim() == 3:
        each = [path for path in paths for _ in range(logits.shape[1])]
        rows = rows.flatten(0, 1)
    whole = rows if vocabulary is None else spread(rows, vocabulary, size, -torch.inf)

    # 2. The same shapers as the target's, then the draft tokens alone.
    shaped = by.shape(each, whole)
    if by.heard is not None:
        by_path = shaped.view(*logits.shape[:-1], -1)
        by.heard.update(zip(paths, by_path, strict=True))
    if vocabulary is not None:
        shaped = shaped[:, vocabulary]
    empty = shaped.amax(-1, keepdim=True) == -torch.inf
    return torch.where(empty, rows, shaped).view_as(logits)


def with_chain(
    root: Tensor,
    chain: Sequence[int],
    tree: TokenTree,
    scheme: Scheme,
    generator: torch.Generator,
) -> TokenTree:
    """A tree with forced tokens above it (`treespec.trees.tree.hung_below`).

    A forced token is a draw from a one-hot law, so every verifier answers it as any other draw.
    root: [1] int64. chain: n tokens; the tree's root carries the last one. scheme: of the draws.
    """
    # 1. Without laws, the children are a function of the text anyway.
    hung = hung_below(root, chain, tree)
    drafts = hung.drafts
    if drafts is None:
        return hung

    # 2. The draws at the chain's nodes.
    q = one_hot(tree.tokens.new_tensor(chain), drafts.q.shape[-1]).to(drafts.q)  # [n, V]
    q = q[:, None] if drafts.q.dim() == 3 else q
    drawn = scheme.draw(q, 1, generator)
    if drafts.draws.sure is not None and drawn.sure is None:
        drawn = replace(drawn, sure=torch.zeros_like(drawn.tokens, dtype=torch.bool))

    # 3. They stand before the tree's.
    nodes = torch.arange(len(chain), device=drafts.nodes.device)
    both = [(nodes, q, drawn), (drafts.nodes, drafts.q, drafts.draws)]
    return replace(hung, drafts=drafts_of(both))


def in_drafts(
    chain: Sequence[int], vocabulary: Tensor | None, device: torch.device
) -> Tensor | None:
    """[n] the draft tokens of a chain; None where one of them is not in the draft vocabulary [N]."""
    tokens = torch.tensor(chain, dtype=torch.int64, device=device)
    if vocabulary is None:
        return tokens
    places = torch.searchsorted(vocabulary, tokens).clamp_max(len(vocabulary) - 1)
    return places if torch.equal(vocabulary[places], tokens) else None


class ForcedDrafter(Drafter):
    """Drafts below the forced tokens of each sequence.

    scheme: of the draws. chains: forced tokens of this cycle, by sequence.
    """

    scheme: Scheme = TopK()
    chains: Sequence[Sequence[int]] = ()

    @abstractmethod
    def learn(self, row: int, path: list[int], out: TreeOutput) -> None:
        """Feedback on a tree. path, out: without the forced tokens above it."""

    def end(self, row: int, root: Tensor) -> Tensor:
        """[1] the token below which a sequence's tree is drafted. root: [1]."""
        return root.new_tensor(self.chains[row][-1:]) if self.chains[row] else root

    def hung(
        self, roots: Tensor, trees: Sequence[TokenTree], generators: Sequence[torch.Generator]
    ) -> list[TokenTree]:
        """The trees below the forced tokens. Each tree's root is the last of them (`end`)."""
        rows = zip(roots.split(1), self.chains, trees, generators, strict=True)
        return [
            with_chain(root, chain, tree, self.scheme, generator) if chain else tree
            for root, chain, tree, generator in rows
        ]

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        for row, (path, out) in enumerate(zip(paths, outs, strict=True)):
            above = len(self.chains[row])
            below = replace(out, logits=out.logits[above:]) if above else out
            self.learn(row, [node - above for node in path[above:]], below)
