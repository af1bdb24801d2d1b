"""A token tree: the draft that a target scores in one forward and a verifier judges."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Draws:
    """The draws at B nodes, in draw order. A field that no scheme filled is None.

    tokens: [B, K] int64. A repeated token is a draw of its own; -1 is an absent draw.
    sure: [B, K] bool, the tokens that are taken from q for sure, not drawn.
    uniforms: [B, K, 2] float64 in [0, 1), independent of the tokens; `optimal` scores draws with
    them.
    """

    tokens: Tensor
    sure: Tensor | None = None
    uniforms: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """Apply `change` to every field that is not None."""

        def changed(field: Tensor | None) -> Tensor | None:
            return None if field is None else change(field)

        return Draws(change(self.tokens), changed(self.sure), changed(self.uniforms))

    def rows(self, nodes: Tensor | slice) -> "Draws":
        """The draws at these rows."""
        return self.each(lambda field: field[nodes])

    def columns(self, order: Tensor) -> "Draws":
        """The draws in these columns of each row. order: [B, M] int64."""

        def taken(field: Tensor) -> Tensor:
            index = order if field.dim() == 2 else order[..., None].expand(-1, -1, field.shape[2])
            return field.gather(1, index)

        return self.each(taken)


@dataclass(frozen=True)
class Drafts:
    """The laws and the draws at the I inner nodes of a tree.

    nodes: [I] int64 node numbers.
    q: [I, V] probabilities that a node's draws came from, or [I, K, V] with a law for each draw.
    draws: one row for each of the I nodes.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


@dataclass(frozen=True)
class Rows:
    """M extra tokens in the target's forward, behind a tree's N nodes (lookahead's n-gram pool).

    The verifier does not judge them and the cache does not keep them.

    tokens: [M] int64.
    depth: [M] int64, positions from the root to the row's token.
    mask: [M, N + M] bool, the nodes and rows that each row sees. No node sees a row.
    asked: number of rows, from the first, whose logits the forward returns.
    """

    tokens: Tensor
    depth: Tensor
    mask: Tensor
    asked: int


@dataclass(frozen=True)
class TokenTree:
    """N nodes; node 0 is the root, the last committed token.

    tokens: [N] int64; -1 where a node's draw is absent.
    parents: [N] int64, parents[0] = -1 and parents[i] < i.
    depth: [N] int64, depth[0] = 0.
    ancestors: [N, N] bool; row i marks node i and its ancestors.
    drafts: the laws and draws; None where the children are a deterministic function of the text
    (top-k, retrieval).
    rows: extra tokens that the drafter asks the target to score; None: there are none.

    A verifier takes a node's first child with a token, so it never reaches the node of a repeat.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    drafts: Drafts | None = None
    rows: Rows | None = None

    def forwarded(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens [N + M], depths [N + M] and mask [N + M, N + M] of the target's forward.

        A tree of three nodes, and two rows d and e. Row d sees the root and itself, row e also d:

            a ─┬─ b          a b c d e
               └─ c      a   x
                         b   x x
                         c   x . x
                         d   x . . x
                         e   x . . x x
        """
        rows = self.rows
        if rows is None:
            return self.tokens, self.depth, self.ancestors
        seen = torch.cat([pad(self.ancestors, (0, len(rows.tokens))), rows.mask])
        return torch.cat([self.tokens, rows.tokens]), torch.cat([self.depth, rows.depth]), seen


def root_only(token: Tensor) -> TokenTree:
    """The tree of one-token-at-a-time decoding: a root without children. token: [1] int64."""
    zero = torch.zeros(1, dtype=torch.int64, device=token.device)
    return TokenTree(token, zero - 1, zero, torch.ones(1, 1, dtype=torch.bool, device=token.device))
