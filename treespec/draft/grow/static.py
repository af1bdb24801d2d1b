"""A tree whose shape is fixed: a level's draws at all its nodes at once."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.grow.growth import Growth
from treespec.draft.models.several import in_turns
from treespec.draft.proposer import Frontier
from treespec.sampling import SamplingParams, probs
from treespec.trees.static import StaticTree, layout
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.scheme import Scheme


def grow_static(
    root: Tensor,
    logits: Tensor,
    tree: StaticTree,
    scheme: Scheme,
    params: SamplingParams,
    generator: torch.Generator,
) -> Growth:
    """root: [1] int64. logits: [1, V] draft logits of its children, or [1, M, V] of M models (`draft_laws`)."""
    tokens = [root]
    laws, draws, nodes = [], [], []
    fixed = layout(tree, logits.device)
    for above, level in zip((None, *fixed.levels[:-1]), fixed.levels, strict=True):
        if above:
            frontier = tokens[-1][level.nodes - above.first].clamp_min(0)
            logits = yield Frontier(frontier, level.parent_rows)
        k = int(level.draws.max())
        if scheme.deterministic:
            q = in_turns(logits, k) if logits.dim() == 3 else logits
        else:
            q = draft_laws(logits, scheme, params, k)
        drawn = scheme.draw(q, level.draws, generator)  # [F, K]
        tokens.append(drawn.tokens[level.rows, level.columns])
        if not scheme.deterministic:
            laws.append(q)
            draws.append(drawn)
            nodes.append(level.nodes)
    drafts = None if scheme.deterministic else Drafts(torch.cat(nodes), table(laws), stack(draws))
    return TokenTree(torch.cat(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)


def draft_laws(logits: Tensor, scheme: Scheme, params: SamplingParams, k: int) -> Tensor:
    """The laws of k draws at F nodes: [F, V], or [F, K, V] where each draw has a model or a temperature of its own.

    logits: [F, V], or [F, M, V] of M models, of which the draws take turns.
    """
    multipliers: tuple[float, ...] = getattr(scheme, "draft_temperatures", ())
    if logits.dim() == 3:
        scale = logits.new_tensor([*multipliers, *multipliers[-1:] * k][:k] or [1.0] * k)
        return probs(logits[:, torch.arange(k) % logits.shape[1]].float() / scale[:, None], params)
    if not multipliers:
        return probs(logits, params)
    laws = [probs(logits, replace(params, temperature=params.temperature * m)) for m in multipliers[:k]]
    return torch.stack(laws + laws[-1:] * (k - len(laws)), dim=1)


def stack(draws: list[Draws]) -> Draws:
    """Draws of several levels as one table, the narrower ones filled up with absent draws."""
    scores = [d.scores for d in draws if d.scores is not None]
    return Draws(table([d.tokens for d in draws], -1), table(scores) if scores else None)


def table(levels: list[Tensor], fill: float = 0.0) -> Tensor:
    """[F, V], or [F, K, ...] of several levels as one; the narrower ones are filled up in K."""
    widest = max(x.shape[1] for x in levels)
    short = [(0, 0) * (x.dim() - 2) + (0, widest - x.shape[1]) for x in levels]
    return torch.cat([pad(x, by, value=fill) if any(by) else x for x, by in zip(levels, short, strict=True)])
