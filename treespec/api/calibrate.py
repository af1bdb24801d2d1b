"""Fit a head's calibration on text: predicted against actual acceptance."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad, softplus

from treespec.api.spec import Spec
from treespec.decoding.sequence import Recorded
from treespec.draft.calibration import COLDEST, DRAWS, TOPS, Calibration, features_of, outline
from treespec.draft.drafter import Proposer
from treespec.draft.trained.kinds import draft_steps, proposer_of, rollout
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.static import eagle
from treespec.verify.distributions import rejections, without
from treespec.verify.rrs import RRSWithoutReplacement, laws_in_turn

Row = tuple[Tensor, Tensor, Tensor]  # tokens [T], which of them count [T] bool, features [T, F]

TEMPERATURES = (0.3, 0.6, 1.0)
FACTORS = tuple(1 + i / 10 for i in range(11))
PROMPTS = 12  # completions that rates are counted over


def calibrate(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    depth: int = 6,
    positions: int = 1500,
    seed: int = 0,
) -> Calibration:
    """Fit a calibration on text that the target would write.

    depth: draft steps. positions: the most positions for each draft step and temperature. Raises
    InputError if the text is too short.
    """
    # 1. The factors of the draft logits.
    limits, weights = (draft_steps(head, depth), positions), []
    sharpness = sharpest(head, target, rows, (limits[0], positions // 3))

    # 2. Sampled outcomes, and the two models fitted to them; the first model again at temperature 0.
    generator = torch.Generator(device=target.output_device).manual_seed(seed)
    for temperatures in (TEMPERATURES, (0.0,)):
        by_step = [
            outcomes(drafted(head, target, rows, limits, sharpness if t else ()), t, generator)
            for t in temperatures
        ]
        samples = [torch.cat(parts) for parts in zip(*chain(*by_step), strict=True)]
        if not samples or not len(samples[0]):
            raise InputError(
                "the text is too short to calibrate a head on: give longer conversations"
            )
        top, hit, draw, accepted, room, weight = samples
        weights.append(logistic(top, hit, weight[:, None]))
        if any(temperatures):
            weights.append(logistic(draw, accepted / room, weight[:, None, None] * room))
    tops, draws, greedy = (tuple(fitted.tolist()) for fitted in weights)
    fitted = Calibration(tops, draws, greedy, {}, sharpness)

    # 3. Rates counted while the target writes, after what precedes the first counted token: at
    #    least a token, and at most half of the context, so that a completion fits.
    proposer, half = proposer_of(head, target), target.context_length // 2
    prompts = [
        tokens[: min(max(int(counts.int().argmax()), 1), half)].tolist()
        for tokens, counts, _ in rows[:PROMPTS]
    ]
    for t in (COLDEST, *TEMPERATURES):
        fitted.rates[f"{t:g}"] = own_rates(target, proposer, prompts, t, fitted)
    return fitted


class Step(NamedTuple):
    """Of a passage and a draft step, from 1: the positions of rows that count, and for R rows p's and q's logits.

    tokens: [R] the text's. target, draft: [R, V] logits of the distributions of these tokens.
    """

    number: int
    chosen: Tensor
    tokens: Tensor
    target: Tensor
    draft: Tensor


def drafted(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    limits: tuple[int, int],
    sharpness: tuple[float, ...] = (),
) -> Iterator[Step]:
    """Draft steps along passages, in turn. limits: draft steps, and positions for each."""
    depth, positions = limits
    for tokens, counts, known in rows:
        if len(tokens) < depth + 3 or positions <= 0:
            continue
        features, last = target.parted(known, head.aux_layers)
        own = target.output_logits(last)  # [T, V], row t: of token t + 1
        steps = rollout(head, target, tokens, features, depth, sharpness)
        for step, logits in enumerate(steps, 1):
            here = slice(step + 1, step + 1 + len(logits))
            chosen = counts[here].nonzero().squeeze(1)[:: depth + 1]
            yield Step(step, chosen, tokens[here], own[step : step + len(logits)], logits)
        positions -= len(chosen)


@torch.no_grad()
def sharpest(
    head: Head, target: Target, rows: Sequence[Row], limits: tuple[int, int]
) -> tuple[float, ...]:
    """For each draft step the factor of the logits at which most drafts are accepted, of FACTORS.

    Accepted: Σ min(p, q), summed over positions and TEMPERATURES.
    """
    accepted = torch.zeros(limits[0], len(FACTORS), dtype=torch.float64)
    for step in drafted(head, target, rows, limits):
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature)
            p, logits = probs(step.target[step.chosen], params), step.draft[step.chosen]
            for i, factor in enumerate(FACTORS):
                q = probs(logits * factor, params)
                accepted[step.number - 1, i] += float(torch.minimum(p, q).sum())
    return tuple(FACTORS[best] for best in accepted.argmax(-1).tolist())


@torch.no_grad()
def outcomes(
    steps: Iterable[Step], temperature: float, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Training data of the two models, from positions at all draft steps.

    Yields for each step features and outcomes as of `tried`, and a weight [n]. The weight approximates
    how often a tree reaches the text's token at that depth: the product of min(1, q/p) over the levels
    above. At temperature 0 the target's choice is certain, and q is
    taken at temperature 1, as for the ranking of a tree's nodes.
    """
    params, weight = SamplingParams(temperature or 1.0), torch.empty(0)
    for step in steps:
        chosen, p, q = step.chosen, probs(step.target, params), probs(step.draft, params)
        if step.number == 1:
            weight = torch.ones(len(q), device=q.device)
        wanted = p[chosen] if temperature else one_hot(p[chosen].argmax(-1), p.shape[1]).to(p)
        yield *tried(wanted, q[chosen], step.number - 1, generator), weight[chosen].cpu()
        following = step.tokens[:, None]
        ratio = q.gather(1, following) / p.gather(1, following).clamp(min=1e-9)
        weight = weight * ratio.squeeze(1).clamp(max=1)


def tried(p: Tensor, q: Tensor, depth: int, generator: torch.Generator) -> list[Tensor]:
    """What a node of the distributions p and q [n, V] shows the models, and what becomes of it.

    On the host: features of the J top tokens [n, J, 4] and whether, or how likely, each is output
    [n, J]; for draws after 0 to J tops features [n, J + 1, M, 7], the probability that each is
    accepted [n, J + 1, M], and the probability that is left for it [n, J + 1, M].
    """
    top, draw = map(torch.from_numpy, features_of(outline(q).cpu().numpy(), depth))
    best = q.topk(min(TOPS, q.shape[-1])).indices
    hit = pad(p.gather(1, best), (0, TOPS - best.shape[1]))
    accepted, room = [], []
    for j in range(TOPS + 1):
        rest = without(q, best[:, :j])
        tokens = RRSWithoutReplacement().draw(rest, DRAWS, generator).tokens
        mass = rejections(p, laws_in_turn(rest, tokens), tokens)[0]
        accepted.append(mass)
        room.append((1 - hit[:, :j].sum(-1, keepdim=True) - mass.cumsum(-1) + mass).clamp(min=1e-6))
    return [top, hit.cpu(), draw, torch.stack(accepted, 1).cpu(), torch.stack(room, 1).cpu()]


def logistic(x: Tensor, y: Tensor, weight: Tensor, steps: int = 30) -> Tensor:
    """[f] weights of a logistic regression, by Newton's method.

    x: [..., f]. y: [...] shares. weight: broadcast to y. A step that raises the loss is halved: on
    few rows full steps may diverge.
    """
    x, weight = x.double().flatten(0, -2), weight.double().expand_as(y).flatten()
    y, weight = y.double().flatten(), weight / weight.sum()
    ridge = 1e-6 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    solution = x.new_zeros(x.shape[1])

    def loss(at: Tensor) -> Tensor:
        return weight @ (softplus(x @ at) - y * (x @ at)) + at @ ridge @ at / 2

    for _ in range(steps):
        share = torch.sigmoid(x @ solution)
        gradient = x.T @ (weight * (share - y)) + ridge @ solution
        hessian = (x.T * (weight * share * (1 - share))) @ x + ridge
        step = torch.linalg.solve(hessian, gradient)
        while loss(solution - step) > loss(solution):
            step = step / 2
        solution = solution - step
    return solution


def own_rates(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    calibration: Calibration | None = None,
    tokens: int = 48,
) -> tuple[float, ...]:
    """[K] Pr(the k-th draw without replacement is accepted), counted over completions of prompts.

    prompts: token ids, at least one each. tokens: the most tokens of a completion. Draws that were
    never judged have no rate.
    """
    tree = eagle().cut(proposer.max_depth) if proposer.max_depth else eagle()
    judged, accepted = torch.zeros(2, tree.max_draws, dtype=torch.float64)  # [K] each

    def count(seen: Recorded) -> None:
        drafts = seen.tree.drafts
        draws_at = (
            dict(zip(drafts.nodes.tolist(), drafts.draws.tokens.cpu(), strict=True))
            if drafts
            else {}
        )
        for node, token in zip([0, *seen.verdict.path], seen.verdict.tokens, strict=True):
            if node in draws_at:
                hit = (draws_at[node] == token).double()
                judged.add_((draws_at[node] >= 0) * (1 - hit.cumsum(0) + hit))
                accepted.add_(hit)

    # 1. Decode and count.
    spec = Spec(target, proposer, tree, "rrs-wo", calibration=calibration)
    for seed, prompt in enumerate(prompts):
        request = spec.request(
            list(prompt), seed=seed, temperature=max(temperature, COLDEST), max_new_tokens=tokens
        )
        request.listener = count
        list(spec.decoder.run([request]))

    # 2. From rates given that earlier draws were refused, to unconditional ones.
    rates = (accepted / judged)[judged > 0]
    return tuple((rates * pad((1 - rates).cumprod(0), (1, -1), value=1)).tolist())
