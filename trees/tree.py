"""A token tree: what the drafter hands to the target and to the verifier."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Draws:
    """The draws made at B nodes, in draw order.

    tokens: [B, K] int64. A repeated token is a draw of its own; -1 is an absent draw.
    sure: [B, K] bool, tokens that were taken for sure and not drawn; None: no scheme asked for
    them.
    uniforms: [B, K, 2] float64 in [0, 1), independent of the tokens, by which `optimal` scores its
    draws.
    places: [B, K] int64, the order in which `valued` drew the tokens before it moved repeats to the
    end.
    """

    tokens: Tensor
    sure: Tensor | None = None
    uniforms: Tensor | None = None
    places: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """The same change to every field that is there."""

        def changed(field: Tensor | None) -> Tensor | None:
            return None if field is None else change(field)

        return Draws(
            change(self.tokens), changed(self.sure), changed(self.uniforms), changed(self.places)
        )

    def rows(self, nodes: Tensor | slice) -> "Draws":
        """The draws of some of the nodes."""
        return self.each(lambda field: field[nodes])

    def columns(self, order: Tensor) -> "Draws":
        """At each node the draws in these columns, [B, M] int64."""

        def taken(field: Tensor) -> Tensor:
            index = order if field.dim() == 2 else order[..., None].expand(-1, -1, field.shape[2])
            return field.gather(1, index)

        return self.each(taken)


@dataclass(frozen=True)
class Drafts:
    """The laws and draws of the I inner nodes of a tree.

    nodes: [I] int64 node numbers. q: [I, V] probabilities that the draws came from, or [I, K, V]
    where each draw has a law of its own. draws: of I nodes.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


@dataclass(frozen=True)
class Rows:
    """M extra tokens in the target's forward, behind a tree's N nodes.

    They are not verified or kept.

    tokens: [M] int64.
    depth: [M] int64 positions between the root and the row's token.
    mask: [M, N + M] bool, the nodes and rows that each row sees. No node sees a row.
    asked: the forward returns the logits of the first `asked` rows.
    """

    tokens: Tensor
    depth: Tensor
    mask: Tensor
    asked: int


@dataclass(frozen=True)
class TokenTree:
    """N nodes; node 0 is the root, the last committed token.

    tokens: [N] int64, -1 for a slot whose draw is absent.
    parents: [N] int64, parents[0] = -1 and parents[i] < i.
    depth: [N] int64, depth[0] = 0.
    ancestors: [N, N] bool, row i marks node i and its ancestors.
    drafts: None when the children are a deterministic function of the text (top-k, retrieval).
    rows: further tokens that the drafter asks the target to score.

    The walk takes the first child that carries a token, so a repeated draw's slot is never reached.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    drafts: Drafts | None = None
    rows: Rows | None = None

    def forwarded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and depth [N + M] of nodes and rows, and the mask [N + M, N + M] of one forward.

        Two rows b, c behind the tree a of one node; b sees a, and c all:

                a b c
            a   x
            b   x x
            c   x x x
        """
        rows = self.rows
        if rows is None:
            return self.tokens, self.depth, self.ancestors
        seen = torch.cat([pad(self.ancestors, (0, len(rows.tokens))), rows.mask])
        return torch.cat([self.tokens, rows.tokens]), torch.cat([self.depth, rows.depth]), seen


def root_only(token: Tensor) -> TokenTree:
    """The tree of one-token-at-a-time decoding. token: [1] int64."""
    zero = torch.zeros(1, dtype=torch.int64, device=token.device)
    return TokenTree(token, zero - 1, zero, torch.ones(1, 1, dtype=torch.bool, device=token.device))
