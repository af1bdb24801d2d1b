"""A token tree: what the drafter hands to the target and to the verifier."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """The draws made at B nodes, in draw order.

    tokens: [B, K] int64. A repeated token is a draw of its own; -1 is an absent draw.
    scores: [B, K] what a scheme attaches to each draw, if it does.
    """

    tokens: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class Drafts:
    """The laws and draws of the I inner nodes of a tree.

    nodes: [I] int64 node numbers. q: [I, V] probabilities that the draws came from, or [I, K, V] where each
    draw has a law of its own. draws: of I nodes.
    """

    nodes: Tensor
    q: Tensor
    draws: Draws


@dataclass(frozen=True)
class TokenTree:
    """N nodes; node 0 is the root, the last committed token.

    tokens: [N] int64, -1 for a slot whose draw is absent. parents: [N] int64, parents[0] = -1 and
    parents[i] < i. depth: [N] int64, depth[0] = 0. ancestors: [N, N] bool, row i marks i and what is above.
    drafts: None when the children are a deterministic function of the text (top-k, retrieval).
    A repeated draw leaves a slot that is never reached: a token means the first child that carries it.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    drafts: Drafts | None = None
