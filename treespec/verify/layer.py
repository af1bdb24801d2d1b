"""Layer verification: to a tree what block verification is to a chain.

Cha, Cho and Yun 2026, Layer Verification Accelerates Speculative Tree Decoding (AdaptFM at ICML
2026): it lifts a scheme that accepts by a known law to trees.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.sampling import TargetLaws, sample
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.laws import normalise
from treespec.verify.partial import LayerScheme
from treespec.verify.walk import Verdict, follow


@final
@dataclass(frozen=True)
class Layer:
    """Keeps the deepest layer whose coin succeeds, and one of its nodes: on average at least as
    deep as the walk's.

    A layer's inner nodes v have weights w_v, W in all, and share one unit of mass by c_v = w_v / W.
    The scheme's plan for W p_v, times c_v, is the weight of the children and leaves R_v; a leaf
    leaves w p. A layer of weight w and R of mass r is kept with r / (r + 1 - w), its node and the
    next token drawn from R. A draw without a node is a leaf that nothing follows. The host waits at
    the start and at the end.
    """

    scheme: LayerScheme
    paced: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"layer:{self.scheme.name}"

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return follow(tree, sample(p[:], generator))
        p = p[:]
        nodes, tokens = tree.drafts.nodes, tree.drafts.draws.tokens
        n, k = len(p), tokens.shape[1]
        same = (tree.parents == nodes[:, None, None]) & (
            tree.tokens == tokens[..., None]
        )  # [I, K, N]
        own = n + torch.arange(tokens.numel(), device=p.device).view_as(tokens)
        place = torch.where(
            same.any(-1), same.int().argmax(-1), own
        )  # [I, K] a draw's node, or a place of its own
        depth = torch.cat([tree.depth, tree.depth[nodes].repeat_interleave(k) + 1])  # [N + I K]

        weight, leaving, rest = self.descend(tree, tree.drafts, place, p)
        layers = torch.zeros(n + 1, dtype=weight.dtype, device=p.device)
        mass, total = (layers.index_add(0, depth, part) for part in (leaving, weight))
        keep = mass / (mass + (1 - total).clamp(min=0)).clamp(min=torch.finfo(mass.dtype).tiny)
        coins = torch.rand(n + 1, generator=generator, dtype=keep.dtype, device=keep.device)
        layer = ((coins < keep) * torch.arange(n + 1, device=keep.device)).amax()
        end = sample(leaving * (depth == layer), generator)[None]
        end = end.masked_fill(
            end >= len(leaving), 0
        )  # NaN logits: fall back to the root, where decode reports them
        row = end.clamp(max=n - 1)
        after = sample(normalise(rest[row], p[row]), generator)
        draw = (end - n).clamp(min=0)  # where it has no node
        node = torch.where(end < n, end, nodes[draw // k])
        token = torch.where(end < n, after, tokens.flatten()[draw])
        above = torch.where(tree.ancestors[node], tree.tokens, -1).squeeze(0)
        token, _, *carried = torch.cat([token, above]).tolist()
        path = [i for i, carries in enumerate(carried, start=1) if carries >= 0]
        return Verdict(path, [*(carried[i - 1] for i in path), token])

    def descend(
        self, tree: TokenTree, drafts: Drafts, place: Tensor, p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and masses of R of all places [N + I K], and [N, V] R, each row to its own scale.

        place: [I, K] the index of each draw's weight.
        """
        weight = torch.zeros(len(p) + place.numel(), dtype=torch.float64, device=p.device)
        weight[0] = 1
        left_mass = torch.zeros_like(drafts.nodes, dtype=weight.dtype)
        rest = p.clone()
        depths = tree.depth[drafts.nodes].tolist()
        for depth in sorted(set(depths)):
            rows = torch.tensor(
                [row for row, d in enumerate(depths) if d == depth], device=p.device
            )
            at = drafts.nodes[rows]
            total = weight[at].sum()
            share = weight[at, None] / total.clamp(min=torch.finfo(weight.dtype).tiny)  # [F, 1]
            draws = drafts.draws.rows(rows)
            accepted, left = self.scheme.partial(p[at] * total.to(p.dtype), drafts.q[rows], draws)
            weight.index_add_(0, place[rows].flatten(), (accepted * share).flatten())
            left_mass[rows] = (left.sum(-1, keepdim=True) * share).squeeze(1)
            rest[at] = left
        leaving = weight.index_copy(0, drafts.nodes, left_mass)
        leaving[0].clamp_(
            min=torch.finfo(leaving.dtype).tiny
        )  # the root is kept where nothing else is
        return weight, leaving, rest
