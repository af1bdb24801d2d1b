"""Fit a head's calibration on text: predicted against actual acceptance."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from treespec.api.spec import Spec
from treespec.decoding.sequence import Recorded
from treespec.draft.calibration import COLDEST, DRAWS, TOPS, Calibration, features_of, outline
from treespec.draft.drafter import Proposer
from treespec.draft.trained.kinds import draft_steps, proposer_of, rollout
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.requests.options import Keywords
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.static import eagle
from treespec.verify.distributions import rejections, without
from treespec.verify.rrs import RRSWithoutReplacement, laws_in_turn

Row = tuple[Tensor, Tensor, Tensor]  # tokens [T], which of them count [T] bool, features [T, F]
Outcomes = tuple[Tensor, ...]  # of `tried`, and a weight [n]

TEMPERATURES = (0.3, 0.6, 1.0)
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
    # 1. Sampled outcomes, and the two models fitted to them.
    generator = torch.Generator(device=target.output_device).manual_seed(seed)
    depth = draft_steps(head, depth)

    def sampled(*temperatures: float) -> list[Tensor]:
        limits, samples = (depth, positions), list[Outcomes]()
        for temperature in temperatures:
            samples += outcomes(head, target, rows, limits, temperature, generator)
        if not sum(len(sample[0]) for sample in samples):
            raise InputError(
                "the text is too short to calibrate a head on: give longer conversations"
            )
        return [torch.cat(parts) for parts in zip(*samples, strict=True)]

    top, top_hit, draw, draw_hit, room, weight = sampled(*TEMPERATURES)
    tops = of_tops(top, top_hit, weight)
    share = weight[:, None, None] * room
    draws = logistic(draw.flatten(0, 2), (draw_hit / room).flatten(), share.flatten())

    # 2. The first model again, at temperature 0.
    top, top_hit, *_, weight = sampled(0.0)
    greedy = of_tops(top, top_hit, weight)

    # 3. Rates counted while the target writes, after what precedes the first counted token: at
    #    least a token, and at most half of the context, so that a completion fits.
    proposer, prompts = proposer_of(head, target), []
    for tokens, counts, _ in rows[:PROMPTS]:
        first = max(int(counts.int().argmax()), 1)
        prompts.append(tokens[: min(first, target.context_length // 2)].tolist())
    rates = {f"{t:g}": own_rates(target, proposer, prompts, t) for t in (COLDEST, *TEMPERATURES)}
    weights = [tuple(fitted.tolist()) for fitted in (tops, draws, greedy)]
    return Calibration(weights[0], weights[1], weights[2], rates)


@torch.no_grad()
def outcomes(
    head: Head,
    target: Target,
    rows: Iterable[Row],
    limits: tuple[int, int],
    temperature: float,
    generator: torch.Generator,
) -> list[Outcomes]:
    """Training data of the two models, from positions at all draft steps.

    For each step: features and outcomes as of `tried`, and a weight [n]. The weight approximates how
    often a tree reaches the text's token at that depth: the product of min(1, q/p) over the levels
    above. limits: draft steps, and positions for each. At temperature 0 the target's choice is
    certain, and q is taken at temperature 1, as for the ranking of a tree's nodes.
    """
    depth, positions = limits
    params = SamplingParams(temperature or 1.0)
    samples: list[Outcomes] = []
    for tokens, counts, known in rows:
        if len(tokens) < depth + 3 or positions <= 0:
            continue
        given, last = target.parted(known, head.aux_layers)
        law = probs(target.output_logits(last), params)  # [T, V], row t: of token t + 1
        weight = torch.ones(len(tokens) - depth - 1, device=law.device)
        for step, logits in enumerate(rollout(head, target, tokens, given, depth)):
            q = probs(logits, params)
            p = law[step + 1 : step + 1 + len(q)]
            following = tokens[step + 2 : step + 2 + len(q), None]
            chosen = counts[step + 2 : step + 2 + len(q)].nonzero().squeeze(1)[:: depth + 1]
            of_chosen = p[chosen]
            if not temperature:
                of_chosen = one_hot(of_chosen.argmax(-1), p.shape[1]).to(p)
            samples.append((*tried(of_chosen, q[chosen], step, generator), weight[chosen].cpu()))
            ratio = q.gather(1, following) / p.gather(1, following).clamp(min=1e-9)
            weight = weight * ratio.squeeze(1).clamp(max=1)
        positions -= len(chosen)
    return samples


def tried(p: Tensor, q: Tensor, depth: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Features and outcomes of one tree node for each row of p and q [n, V], on the host."""
    top, draw = map(torch.from_numpy, features_of(outline(q), depth))
    best = q.topk(min(TOPS, q.shape[-1])).indices
    hit = torch.zeros(top.shape[:2], device=q.device)
    hit[:, : best.shape[1]] = p.gather(1, best)
    accepted, room = [], []
    for j in range(TOPS + 1):
        rest = without(q, best[:, :j])
        tokens = RRSWithoutReplacement().draw(rest, DRAWS, generator).tokens
        mass = rejections(p, laws_in_turn(rest, tokens), tokens)[0]
        accepted.append(mass)
        room.append((1 - hit[:, :j].sum(-1, keepdim=True) - mass.cumsum(-1) + mass).clamp(min=1e-6))
    return top, hit.cpu(), draw, torch.stack(accepted, dim=1).cpu(), torch.stack(room, dim=1).cpu()


def of_tops(top: Tensor, hit: Tensor, weight: Tensor) -> Tensor:
    """[4] weights of the model of top tokens. top: [n, J, 4]. hit: [n, J]. weight: [n]."""
    share = weight[:, None].expand_as(hit)
    return logistic(top.flatten(0, 1), hit.flatten(), share.flatten())


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


def own_rates(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    tokens: int = 48,
    seed: int = 0,
) -> tuple[float, ...]:
    """[K] Pr(the k-th draw without replacement is accepted), counted over completions of prompts.

    prompts: token ids, at least one each. tokens: the most tokens of a completion. Draws that were
    never judged have no rate.
    """
    tree = eagle().cut(proposer.max_depth) if proposer.max_depth else eagle()
    judged, accepted = torch.zeros(2, tree.max_draws, dtype=torch.float64)  # [K] each

    def count(seen: Recorded) -> None:
        drafts, verdict = seen.tree.drafts, seen.verdict
        if drafts is None:
            return
        draws_at = dict(zip(drafts.nodes.tolist(), drafts.draws.tokens.cpu(), strict=True))  # [K]
        for node, token in zip([0, *verdict.path], verdict.tokens, strict=True):
            if (draws := draws_at.get(node)) is not None:
                hit = (draws == token).double()
                judged.add_((draws >= 0) * (1 - hit.cumsum(0) + hit))
                accepted.add_(hit)

    # 1. Decode and count.
    spec = Spec(target, proposer, tree, "rrs-wo")
    options: Keywords = {"temperature": max(temperature, COLDEST), "max_new_tokens": tokens}
    for i, prompt in enumerate(prompts):
        request = spec.request(list(prompt), seed=seed + i, **options)
        request.listener = count
        for _ in spec.decoder.run([request]):
            pass

    # 2. From rates given that earlier draws were refused, to unconditional ones.
    rates = (accepted / judged)[judged > 0]
    refused = (1 - rates).cumprod(0)
    return tuple((rates * torch.cat([refused.new_ones(1), refused[:-1]])).tolist())
