"""Growing a tree of fixed shape: one draft step and one batch of draws for each level."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafter import Frontier
from treespec.draft.grow.growth import Growth
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.scheme import Scheme

Drawn = tuple[Tensor, Tensor, Draws]  # of one level: its F inner nodes [F], their q and their draws


def grow_fixed(
    root: Tensor,
    logits: Tensor,
    tree: StaticTree,
    scheme: Scheme,
    params: SamplingParams,
    generator: torch.Generator,
) -> Growth:
    """The growth of a tree of fixed shape.

    root: [1] int64.
    logits: [1, V] draft logits of its children, or [1, M, V] of M models (`draft_laws`).
    """
    tokens, levels = [root], list[Drawn]()
    fixed = layout(tree, logits.device)
    for above, level in zip((None, *fixed.levels[:-1]), fixed.levels, strict=True):
        # 1. The draft logits below the level's inner nodes. A child whose draw is absent is
        #    drafted for as token 0.
        if above:
            frontier = tokens[-1][level.nodes - above.first].clamp_min(0)
            logits = yield Frontier(frontier, level.parent_rows)

        # 2. The draws at all of these nodes.
        k = int(level.draws.max())
        if scheme.deterministic:
            q = in_turns(logits, k) if logits.dim() == 3 else logits
        else:
            q = draft_laws(logits, scheme, params, k)
        drawn = scheme.draw(q, level.draws, generator)  # [F, K]

        # 3. The children's tokens, and what the verifier needs.
        tokens.append(drawn.tokens[level.rows, level.columns])
        levels.append((level.nodes, q, drawn))
    drafts = None if scheme.deterministic else drafts_of(levels)
    return TokenTree(torch.cat(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)


def drafts_of(levels: list[Drawn]) -> Drafts | None:
    """The distributions and draws of all levels; None without any level."""
    if not levels:
        return None
    nodes, laws, draws = (list(parts) for parts in zip(*levels, strict=True))
    return Drafts(torch.cat(nodes), table(laws), stack(draws))


def draft_laws(logits: Tensor, scheme: Scheme, params: SamplingParams, k: int) -> Tensor:
    """The laws of k draws at F nodes, as probabilities.

    [F, V], or [F, K, V] where each draw has a model or a temperature of its own.
    logits: [F, V], or [F, M, V] of M models; draw i uses model i modulo M.
    """
    multipliers = scheme.draft_temperatures
    if logits.dim() == 3:
        scale = logits.new_tensor([*multipliers, *multipliers[-1:] * k][:k] or [1.0] * k)
        in_turn = logits[:, torch.arange(k) % logits.shape[1]]
        return probs(in_turn.float() / scale[:, None], params)
    if not multipliers:
        return probs(logits, params)
    hotter = [replace(params, temperature=params.temperature * m) for m in multipliers[:k]]
    laws = [probs(logits, one_draw) for one_draw in hotter]
    return torch.stack(laws + laws[-1:] * (k - len(laws)), dim=1)


def in_turns(logits: Tensor, k: int) -> Tensor:
    """[F, V] scores that rank the models' likeliest tokens first, the models taking turns.

    The k largest scores are k, k - 1, … Each model in its turn gives its likeliest token that no
    turn before has given. Two models over five tokens, k = 4:

        likeliest of model 0     d b a c e         turns     0: d  1: b  0: a  1: c
        likeliest of model 1     d b c a e         scores    a 2, b 3, c 1, d 4, e 0

    logits: [F, M, V].
    """
    models, size = logits.shape[1:]
    scores = torch.zeros_like(logits[:, 0])
    # The lowest finite value ranks padding last, but before tokens that are already taken.
    finite = logits.clamp_min(torch.finfo(logits.dtype).min)
    for draw in range(min(k, size)):
        left = finite[:, draw % models].masked_fill(scores > 0, -torch.inf)
        scores.scatter_(1, left.argmax(-1, keepdim=True), float(k - draw))
    return scores


def stack(draws: list[Draws]) -> Draws:
    """The draws of several levels as one table. Absent draws pad the narrower levels."""

    def joined(fields: list[Tensor | None], fill: float) -> Tensor | None:
        present = [field for field in fields if field is not None]
        return table(present, fill) if present else None

    return Draws(
        table([level.tokens for level in draws], -1),
        joined([level.sure for level in draws], False),
        joined([level.uniforms for level in draws], 0),
    )


def table(levels: list[Tensor], fill: float = 0.0) -> Tensor:
    """[I, V] or [I, K, ...]: the rows of several levels. `fill` pads the narrower levels in K.

    Levels [1, 3] and [2, 2]:

        a b c          a b c
        d e      ->    d e .
        f g            f g .
    """
    widest = max(level.shape[1] for level in levels)
    padded = []
    for level in levels:
        missing = widest - level.shape[1]
        behind = (0, 0) * (level.dim() - 2) + (0, missing)
        padded.append(pad(level, behind, value=fill) if missing else level)
    return torch.cat(padded)
