"""Fit a head's calibration on text: predicted against actual acceptance."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from treespec.draft.calibration import DRAWS, TOP_FEATURES, TOPS, Calibration
from treespec.draft.fit.own_rates import COLDEST, own_rates
from treespec.draft.outlines import features
from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.draft.tree_drafter import TreeDrafter
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.shaping.law import Law
from treespec.shaping.sampling import SamplingParams, largest, probs
from treespec.trees.sampled import SampledTree
from treespec.verify.laws import rejections, without
from treespec.verify.rrs_wo import RRSWithoutReplacement, laws_of

Row = tuple[Tensor, Tensor, Tensor]  # tokens [T], which of them count [T] bool, features [T, F]

TEMPERATURES = (0.3, 0.6, 1.0)
PRICES = (0.1, 0.05, 0.025, 0.0125, 0.006)
PROMPTS = 12  # answers that rates are counted over
ROOTS = 24  # positions at which trees are grown, for each price and temperature


def calibrate(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    depth: int = 6,
    positions: int = 1500,
    seed: int = 0,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Calibration:
    """Fit a calibration on text that the target would write.

    depth: draft steps. positions: the most positions for each draft step and temperature. Raises
    InputError if the text is too short.
    """
    # 1. Sampled outcomes, and the two models fitted to them.
    generator = torch.Generator(device=target.output_device).manual_seed(seed)
    depth = draft_steps(head, depth)
    samples: list[tuple[Tensor, ...]] = []
    for temperature in temperatures:
        samples += outcomes(head, target, rows, depth, positions, temperature, generator)
    if not sum(len(sample[0]) for sample in samples):
        raise InputError("the text is too short to calibrate a head on: give longer conversations")
    top, top_hit, draw, draw_hit, room, weight = (
        torch.cat(parts) for parts in zip(*samples, strict=True)
    )
    share = weight[:, None].expand_as(top_hit)
    tops = logistic(top.flatten(0, 1), top_hit.flatten(), share.flatten())
    share = weight[:, None, None] * room
    draws = logistic(draw.flatten(0, 2), (draw_hit / room).flatten(), share.flatten())

    # 2. The first model again, at temperature 0.
    choice = [choices(head, target, row, depth, positions // len(rows) + 1) for row in rows]
    seen, taken, share = (torch.cat(parts) for parts in zip(*choice, strict=True))
    greedy = logistic(seen, taken, share)

    # 3. Tree sizes by price, and rates counted while the target writes.
    fitted = Calibration(tuple(tops.tolist()), tuple(draws.tolist()), {}, tuple(greedy.tolist()))
    sizes, rates = {}, {}
    for t in temperatures:
        sizes[f"{t:g}"] = tree_sizes(head, target, rows, fitted, depth, t, generator)
    proposer = KINDS[head.kind].proposer(head, target)
    prompts = prompts_of(rows, target)
    for t in (COLDEST, *temperatures):
        rates[f"{t:g}"] = own_rates(target, proposer, prompts, t, seed=seed)
    return replace(fitted, sizes=sizes, rates=rates)


def prompts_of(rows: Sequence[Row], target: Target) -> list[list[int]]:
    """For PROMPTS rows the tokens before the first counted one.

    At least one token, and at most half of the context, so that an answer fits.
    """
    prompts = []
    for tokens, counts, _ in rows[:PROMPTS]:
        first = max(int(counts.int().argmax()), 1)
        prompts.append(tokens[: min(first, target.context_length // 2)].tolist())
    return prompts


@torch.no_grad()
def outcomes(
    head: Head,
    target: Target,
    rows: Iterable[Row],
    depth: int,
    positions: int,
    temperature: float,
    generator: torch.Generator,
) -> list[tuple[Tensor, ...]]:
    """Training data of the two models, from positions at all draft steps.

    For each step: features of tops and draws, p of the tops [n, J], mass accepted by each draw
    [n, J + 1, M], mass left for it, and a weight [n]. The weight approximates how often a tree
    reaches the text's token at that depth: the product of min(1, q/p) over the levels above.
    """
    params = SamplingParams(temperature)
    samples: list[tuple[Tensor, ...]] = []
    for tokens, counts, known in rows:
        if len(tokens) < depth + 3 or positions <= 0:
            continue
        given, last = target.parted(known, head.taps)
        law = probs(target.output_logits(last), params)  # [T, V], row t: of token t + 1
        weight = torch.ones(len(tokens) - depth - 1, device=law.device)
        for step, logits in enumerate(KINDS[head.kind].rollout(head, target, tokens, given, depth)):
            q = probs(logits, params)
            p = law[step + 1 : step + 1 + len(q)]
            following = tokens[step + 2 : step + 2 + len(q), None]
            chosen = counts[step + 2 : step + 2 + len(q)].nonzero().squeeze(1)[:: depth + 1]
            samples.append((*tried(p[chosen], q[chosen], step, generator), weight[chosen].cpu()))
            ratio = q.gather(1, following) / p.gather(1, following).clamp(min=1e-9)
            weight = weight * ratio.squeeze(1).clamp(max=1)
        positions -= len(chosen)
    return samples


@torch.no_grad()
def choices(
    head: Head, target: Target, row: Row, depth: int, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Training data at temperature 0: features of tops, hits and weights, [n, 4], [n] and [n].

    A hit is a top that is the target's choice. q is taken at temperature 1, as for the ranking of a
    tree's nodes. Weights are those of `outcomes`.
    """
    # 1. The target's laws, and the chance that a tree reaches each position.
    tokens, counts, known = row
    samples = []
    weight = torch.ones(max(len(tokens) - depth - 1, 0), device=known.device)
    given, last = target.parted(known, head.taps)
    law = probs(target.output_logits(last), SamplingParams(1.0))

    # 2. The head's tops at each draft step, compared with them.
    for step, logits in enumerate(KINDS[head.kind].rollout(head, target, tokens, given, depth)):
        q = probs(logits, SamplingParams(1.0))
        p, following = law[step + 1 : step + 1 + len(q)], tokens[step + 2 : step + 2 + len(q), None]
        chosen = counts[step + 2 : step + 2 + len(q)].nonzero().squeeze(1)[:positions]
        best = largest(q[chosen], min(TOPS, q.shape[-1]))[1]
        hit = (best == p[chosen].argmax(-1, keepdim=True)).double().cpu()
        top = features(q[chosen], step)[0][:, : best.shape[1]]
        share = weight[chosen, None].cpu().expand_as(hit)
        samples.append((top.flatten(0, 1), hit.flatten(), share.flatten()))
        ratio = q.gather(1, following) / p.gather(1, following).clamp(min=1e-9)
        weight = weight * ratio.squeeze(1).clamp(max=1)
    if not samples:
        return torch.zeros(0, TOP_FEATURES), torch.zeros(0), torch.zeros(0)
    tops, hits, shares = (torch.cat(parts) for parts in zip(*samples, strict=True))
    return tops, hits, shares


def tried(p: Tensor, q: Tensor, depth: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Features and outcomes of one tree node for each row of p and q [n, V], on the host."""
    top, draw = features(q, depth)
    best = q.topk(min(TOPS, q.shape[-1])).indices
    hit = torch.zeros(top.shape[:2], device=q.device)
    hit[:, : best.shape[1]] = p.gather(1, best)
    accepted, room = [], []
    for j in range(TOPS + 1):
        rest = without(q, best[:, :j])
        tokens = RRSWithoutReplacement().draw(rest, DRAWS, generator).tokens
        mass = rejections(p, laws_of(rest, tokens), tokens)[0]
        accepted.append(mass)
        room.append((1 - hit[:, :j].sum(-1, keepdim=True) - mass.cumsum(-1) + mass).clamp(min=1e-6))
    return top, hit.cpu(), draw, torch.stack(accepted, dim=1).cpu(), torch.stack(room, dim=1).cpu()


def logistic(x: Tensor, y: Tensor, weight: Tensor, steps: int = 30) -> Tensor:
    """[f] weights of a logistic regression, by Newton's method.

    x: [n, f]. y: [n] shares. weight: [n]. A step that raises the loss is halved: on few rows full
    steps may diverge.
    """
    x, y, weight = x.double(), y.double(), weight.double() / weight.sum()
    ridge = 1e-6 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    solution = x.new_zeros(x.shape[1])

    def loss(at: Tensor) -> Tensor:
        return weight @ (softplus(x @ at) - y * (x @ at)) + at @ ridge @ at / 2

    for _ in range(steps):
        chance = torch.sigmoid(x @ solution)
        gradient = x.T @ (weight * (chance - y)) + ridge @ solution
        hessian = (x.T * (weight * chance * (1 - chance))) @ x + ridge
        step = torch.linalg.solve(hessian, gradient)
        while loss(solution - step) > loss(solution):
            step = step / 2
        solution = solution - step
    return solution


def tree_sizes(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    calibration: Calibration,
    depth: int,
    temperature: float,
    generator: torch.Generator,
) -> list[tuple[float, float]]:
    """Pairs (price, mean nodes of the trees at that price), grown from positions of the text."""
    law, sizes = Law(SamplingParams(temperature)), []
    roots = []
    for row in rows:
        counted = row[1][1:].nonzero().squeeze(1)[::40] + 1
        roots += [(row, at) for at in counted.tolist()[:3]]
    for price in PRICES:
        nodes = []
        for (tokens, _, known), at in roots[:ROOTS]:
            proposer = KINDS[head.kind].proposer(head, target)
            proposer.observe([target.parted(known[:at], head.taps)[0]], [tokens[: at + 1]])
            tree = SampledTree(depth=depth, price=price)
            drafter = TreeDrafter(proposer, tree, RRSWithoutReplacement(), calibration)
            cache = target.new_cache()
            (drafted,) = drafter.draft_trees(tokens[at : at + 1], [law], [generator], cache)
            nodes.append(len(drafted.tokens))
        sizes.append((price, sum(nodes) / len(nodes)))
    return sizes
