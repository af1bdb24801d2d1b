"""A tree whose shape is fixed: a level's draws at all its nodes at once."""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.grow.grower import DraftModel, Grower, check_depth, check_width
from treespec.draft.grow.growth import Growth
from treespec.draft.proposer import Frontier
from treespec.errors import InputError
from treespec.sampling import SamplingParams, probs
from treespec.trees.static import StaticTree, layout
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.scheme import Scheme

LAST = 1 << 30  # the place of an absent draw: behind all others


@final
class StaticGrower(Grower[StaticTree]):
    @staticmethod
    def fits(policy: StaticTree, scheme: Scheme, model: DraftModel) -> None:
        """Draft models that take turns have a law for each draw, so their scheme has to take one."""
        if model.several and not (scheme.deterministic or scheme.law_per_draw):
            raise InputError(
                f"verifier {scheme.name} takes one draft law a node, several draft models have one each: "
                "take --verifier rrs, is-lp or topk"
            )
        check_width(policy.max_draws, scheme)
        check_depth(policy.max_depth, model, "chain:")

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        return grow_static(
            root, logits, self.policy, self.means.scheme_at(params), params, generator
        )


def grow_static(
    root: Tensor,
    logits: Tensor,
    tree: StaticTree,
    scheme: Scheme,
    params: SamplingParams,
    generator: torch.Generator,
) -> Growth:
    """root: [1] int64.

    logits: [1, V] draft logits of its children, or [1, M, V] of M models (`draft_laws`).
    """
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
    """The laws of k draws at F nodes: [F, V], or [F, K, V] where each draw has a model or a
    temperature of its own.

    logits: [F, V], or [F, M, V] of M models, of which the draws take turns.
    """
    multipliers = scheme.draft_temperatures
    if logits.dim() == 3:
        scale = logits.new_tensor([*multipliers, *multipliers[-1:] * k][:k] or [1.0] * k)
        return probs(logits[:, torch.arange(k) % logits.shape[1]].float() / scale[:, None], params)
    if not multipliers:
        return probs(logits, params)
    laws = [
        probs(logits, replace(params, temperature=params.temperature * m)) for m in multipliers[:k]
    ]
    return torch.stack(laws + laws[-1:] * (k - len(laws)), dim=1)


def in_turns(logits: Tensor, k: int) -> Tensor:
    """[F, V] scores by whose order k draws are the models' likeliest tokens by turns.

    logits: [F, M, V].

    A token that a model before has brought gives its turn away to that model's next.
    """
    models, size = logits.shape[1:]
    scores = torch.zeros_like(logits[:, 0])
    finite = logits.clamp_min(
        torch.finfo(logits.dtype).min
    )  # padding ranks last, but before taken tokens
    for draw in range(min(k, size)):
        left = finite[:, draw % models].masked_fill(scores > 0, -torch.inf)
        scores.scatter_(1, left.argmax(-1, keepdim=True), float(k - draw))
    return scores


def stack(draws: list[Draws]) -> Draws:
    """Draws of several levels as one table, the narrower ones filled up with absent draws."""

    def joined(fields: list[Tensor | None], fill: float) -> Tensor | None:
        present = [field for field in fields if field is not None]
        return table(present, fill) if present else None

    return Draws(
        table([level.tokens for level in draws], -1),
        joined([level.sure for level in draws], False),
        joined([level.uniforms for level in draws], 0),
        joined([level.places for level in draws], LAST),
    )


def table(levels: list[Tensor], fill: float = 0.0) -> Tensor:
    """[F, V], or [F, K, ...] of several levels as one; the narrower ones are filled up in K."""
    widest = max(x.shape[1] for x in levels)
    short = [(0, 0) * (x.dim() - 2) + (0, widest - x.shape[1]) for x in levels]
    return torch.cat(
        [pad(x, by, value=fill) if any(by) else x for x, by in zip(levels, short, strict=True)]
    )
