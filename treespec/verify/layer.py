"""Layer verification: block verification of a chain, lifted to trees.

Cha, Cho and Yun 2026, Layer Verification Accelerates Speculative Tree Decoding (AdaptFM at ICML
2026). It takes any scheme whose acceptance has a known distribution (`LayerScheme`).
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.shaping.sampling import happens, sample
from treespec.trees.tree import Drafts, TokenTree, sent
from treespec.verify.distributions import normalise, positive
from treespec.verify.scheme import LayerScheme
from treespec.verify.walk import Judging, Probabilities, Verdict, answered, follow


@final
@dataclass(frozen=True)
class Layer:
    """Keeps the deepest layer whose coin succeeds, and one node of that layer.

    On average the node is at least as deep as the end of the scheme's walk. The inner nodes v of a
    layer have weights w_v with sum W. They share one unit of mass by c_v = w_v / W:

        weight of the children of v    c_v times the mass that the scheme's plan for W p_v accepts
        R_v                            c_v times the mass that this plan leaves
        R_v of a leaf                  w_v p_v

    A layer of weight W whose R has mass r is kept with probability r / (r + 1 - W). R then is the
    distribution of its node and of the next token. A draw without a node is a leaf; no token follows it. The
    host waits at the start and at the end.
    """

    scheme: LayerScheme
    coupled = False

    @property
    def name(self) -> str:
        return f"layer:{self.scheme.name}"

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities."""
        return answered([self.at_once(tree, p, generator)])[0]

    def at_once(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Judging:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return (yield from follow(tree, sample(p[:], generator)))
        p = p[:]
        drafts, n = tree.drafts, len(p)
        nodes, tokens = drafts.nodes, drafts.draws.tokens
        depths = (yield tree.depth[nodes]).tolist()

        # 1. A place for every node and every draw, and its depth.
        place = places_of_draws(tree, drafts)
        depth_of_draws = tree.depth[nodes].repeat_interleave(tokens.shape[1]) + 1
        depth = torch.cat([tree.depth, depth_of_draws])  # [N + I K]

        # 2. Weights W and masses r of the layers.
        weight, leaving, rest = self.descend(drafts, depths, place, p)
        layers = torch.zeros(n + 1, dtype=weight.dtype, device=p.device)
        mass, total = (layers.index_add(0, depth, part) for part in (leaving, weight))

        # 3. The deepest layer whose coin succeeds.
        keep = mass / positive(mass + (1 - total).clamp(min=0))
        layer = (happens(keep, generator) * torch.arange(n + 1, device=keep.device)).amax()

        # 4. Its node and the next token. NaN logits: fall back to the root, where decode reports
        #    them.
        end = sample(leaving * (depth == layer), generator)[None]
        end = end.masked_fill(end >= len(leaving), 0)
        row = end.clamp(max=n - 1)
        after = sample(normalise(rest[row], p[row]), generator)

        # 5. Of a draw without a node: its parent's path, and its own token.
        draw = (end - n).clamp(min=0)
        node = torch.where(end < n, end, nodes[draw // tokens.shape[1]])
        token = torch.where(end < n, after, tokens.flatten()[draw])

        # 6. The path to the node, in one copy to the host.
        above = torch.where(tree.ancestors[node], tree.tokens, -1).squeeze(0)
        last, _, *carried = (yield torch.cat([token, above])).tolist()
        path = [i for i, carries in enumerate(carried, start=1) if carries >= 0]
        return Verdict(path, [*(carried[i - 1] for i in path), last])

    def descend(
        self, drafts: Drafts, depths: list[int], place: Tensor, p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weights [N + I K] and masses of R [N + I K] of all places, and R [N, V].

        Each row of R has a scale of its own. depths: of the inner nodes. place: [I, K]
        (`places_of_draws`).
        """
        # 1. The root has weight 1. Weights flow down, an inner layer at a time.
        weight = torch.zeros(len(p) + place.numel(), dtype=torch.float64, device=p.device)
        weight[0] = 1
        left_mass = torch.zeros_like(drafts.nodes, dtype=weight.dtype)
        rest = p.clone()
        for layer in sorted(set(depths)):
            # 2. The layer's inner nodes, and the share c of each.
            in_layer = [row for row, depth in enumerate(depths) if depth == layer]
            rows = sent(in_layer, p.device)
            at = drafts.nodes[rows]
            total = weight[at].sum()
            share = weight[at, None] / positive(total)  # [F, 1]

            # 3. What the scheme accepts of W p goes to the draws, what it leaves is R.
            draws = drafts.draws.rows(rows)
            accepted, left = self.scheme.partial(p[at] * total.to(p.dtype), drafts.q[rows], draws)
            weight.index_add_(0, place[rows].flatten(), (accepted * share).flatten())
            left_mass[rows] = (left.sum(-1, keepdim=True) * share).squeeze(1)
            rest[at] = left

        # 4. A leaf leaves its whole weight. The root is kept where no other node is.
        leaving = weight.index_copy(0, drafts.nodes, left_mass)
        leaving[:1] = positive(leaving[:1])
        return weight, leaving, rest


def places_of_draws(tree: TokenTree, drafts: Drafts) -> Tensor:
    """[I, K] int64: the place of each draw's weight, its node's number or a place of its own.

    Five nodes, of which 0, 1 and 2 have two draws each; draw 1 of node 2 repeats the token of
    draw 0, and draw 1 of node 1 has no node. Places from N = 5 on are numbered as the draws are:

        0 ─┬─ a: 1 ─┬─ c: 3        draws     places
           │        └─ d           a b       1 2
           └─ b: 2 ─┬─ e: 4        c d       3 8
                    └─ e           e e       4 4
    """
    tokens = drafts.draws.tokens
    is_child = tree.parents == drafts.nodes[:, None, None]
    same = is_child & (tree.tokens == tokens[..., None])  # [I, K, N]
    beyond = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens) + len(tree.tokens)
    return torch.where(same.any(-1), same.int().argmax(-1), beyond)
