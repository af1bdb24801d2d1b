"""Fit a head's calibration on text: from the probabilities of its drafts to their acceptance rates."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from treespec.api.spec import Spec
from treespec.draft.calibration import GREEDY_TEMPERATURE, Calibration, build_calibration_features
from treespec.draft.drafter import Proposer
from treespec.draft.heads.loading import build_proposer, draft_steps, roll_out_drafts
from treespec.engine.request import CycleRecord
from treespec.errors import InputError
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.static import build_eagle_tree
from treespec.verify.rrs import RRSWithoutReplacement

Row = tuple[Tensor, Tensor, Tensor]  # tokens [T], whether each counts [T] bool, features [T, F]

CALIBRATED_TEMPERATURES = (0.3, 0.6, 1.0)
SHARPNESS_FACTORS = tuple(1 + i / 10 for i in range(11))
SHARPNESS_TIME_SHARE = 0.2  # of the time of a calibration, for the factors of the draft logits
CHOICES_TIME_SHARE = 0.4  # for these and the model of greedy choices
RATE_POSITIONS = 150  # of each draft step, along which acceptance rates are computed
RATE_DRAWS = 4  # draws at each of them
RATE_PROMPTS = 12  # completions over which acceptance rates are counted
RATE_TOKENS = 48  # of each, at most
CALIBRATED_RANKS = 5  # most likely tokens of a node that the model learns from


def calibrate(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    depth: int = 6,
    positions: int = 1500,
    seconds: float = math.inf,
) -> Calibration:
    """Fit a calibration on text that the target would write.

    Args:
        head: The trained head.
        target: Its target. If it has its ends only, acceptance rates are computed along the passages, not counted
            while it writes.
        rows: Passages of text with the target's features. Tokens that do not count are skipped.
        depth: Draft steps. Default: 6.
        positions: The most positions for each draft step and temperature. Default: 1500.
        seconds: About the time that it may take: later passages are left out. A passage for each part is
            always read. Default: no limit.

    Raises:
        InputError: If the text is too short.
    """
    # 1. The factors of the draft logits, and the model of greedy choices.
    depth = draft_steps(head, depth)
    started = time.monotonic()
    end = started + SHARPNESS_TIME_SHARE * seconds
    sharpness = fit_sharpness(head, target, rows, depth, positions // 3, end)
    end = started + CHOICES_TIME_SHARE * seconds
    draft_rows = iterate_draft_steps(head, target, rows, depth, positions, end=end)
    samples = list(iterate_choices(draft_rows))
    if not samples or not len(samples[0][0]):
        raise InputError("the text is too short to calibrate a head on: give longer conversations")
    features = torch.cat([step_features for step_features, _, _ in samples])
    hits = torch.cat([step_hits for _, step_hits, _ in samples])
    weights = torch.cat([step_weights for _, _, step_weights in samples])
    coefficients = tuple(fit_logistic(features, hits, weights[:, None]).tolist())
    calibration = Calibration(coefficients, {}, sharpness)

    # 2. Rates along the passages, where the target cannot write.
    if target.ends:
        rate_rows = iterate_draft_steps(
            head, target, rows, depth, RATE_POSITIONS, sharpness, started + seconds
        )
        calibration.rates.update(predict_draw_rates(rate_rows))
        return calibration

    # 3. Rates counted while the target writes. A prompt is what precedes the first token that counts:
    #    at least one token, and at most half of the context, so that a completion fits.
    proposer = build_proposer(head, target)
    half_context = target.context_length // 2
    prompts = []
    for tokens, counts, _ in rows[:RATE_PROMPTS]:
        first_counted = int(counts.int().argmax())
        size = min(max(first_counted, 1), half_context)
        prompts.append(tokens[:size].tolist())
    temperatures = (GREEDY_TEMPERATURE,) + CALIBRATED_TEMPERATURES
    for number, temperature in enumerate(temperatures, start=1):
        share = CHOICES_TIME_SHARE + (1 - CHOICES_TIME_SHARE) * number / len(temperatures)
        end = started + share * seconds
        rates = measure_draw_rates(
            target, proposer, prompts, temperature, calibration, RATE_TOKENS, end
        )
        calibration.rates[f"{temperature:g}"] = rates
    return calibration


class CalibrationStep(NamedTuple):
    """One draft step along a passage of R + number + 1 tokens.

    Attributes:
        number: Of the draft step, from 1.
        chosen: Indices of the rows to learn from.
        tokens: [R] the passage's tokens that the step drafts.
        target: [R, V] the target's logits for these tokens.
        draft: [R, V] the draft logits for them.
    """

    number: int
    chosen: Tensor
    tokens: Tensor
    target: Tensor
    draft: Tensor


def iterate_draft_steps(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    depth: int,
    positions: int,
    sharpness: tuple[float, ...] = (),
    end: float = math.inf,
) -> Iterator[CalibrationStep]:
    """Run a head along each passage and yield its draft steps.

    Args:
        head: The trained head.
        target: Its target.
        rows: Passages of text with the target's features.
        depth: Draft steps.
        positions: The most positions for each draft step; later passages are left out.
        sharpness: For each draft step the factor of its logits, from a calibration. Default: none.
        end: The time of `time.monotonic` after which no further passage begins. Default: none.
    """
    passages = 0
    for tokens, counts, target_features in rows:
        if len(tokens) < depth + 3 or positions <= 0 or (passages and time.monotonic() > end):
            continue
        passages += 1
        features, last = target.split_features(target_features, head.aux_layers)
        target_logits = target.compute_output_logits(last)  # [T, V], row t is for token t + 1
        steps = roll_out_drafts(head, target, tokens, features, depth, sharpness)
        for step, logits in enumerate(steps, 1):
            drafted_tokens = slice(step + 1, step + 1 + len(logits))
            chosen = counts[drafted_tokens].nonzero().squeeze(1)[:: depth + 1]
            p_logits = target_logits[step : step + len(logits)]
            yield CalibrationStep(step, chosen, tokens[drafted_tokens], p_logits, logits)
        positions -= len(chosen)


@torch.no_grad()
def fit_sharpness(
    head: Head,
    target: Target,
    rows: Sequence[Row],
    depth: int,
    positions: int,
    end: float = math.inf,
) -> tuple[float, ...]:
    """Find for each draft step the factor of its logits at which most drafts are accepted.

    The candidates are SHARPNESS_FACTORS. What is accepted is Σ min(p, q), summed over positions and
    CALIBRATED_TEMPERATURES. The arguments are those of `iterate_draft_steps`.
    """
    accepted = torch.zeros(depth, len(SHARPNESS_FACTORS), dtype=torch.float64, device="cpu")
    for step in iterate_draft_steps(head, target, rows, depth, positions, end=end):
        for temperature in CALIBRATED_TEMPERATURES:
            params = SamplingParams(temperature)
            p = compute_probs(step.target[step.chosen], params)
            logits = step.draft[step.chosen]
            for i, factor in enumerate(SHARPNESS_FACTORS):
                q = compute_probs(logits * factor, params)
                accepted[step.number - 1, i] += float(torch.minimum(p, q).sum())
    return tuple(SHARPNESS_FACTORS[best] for best in accepted.argmax(-1).tolist())


@torch.no_grad()
def iterate_choices(steps: Iterable[CalibrationStep]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the training samples of each draft step, on the host: features, hits and weights.

    features: [n, K, 4] of the K most likely draft tokens. hits: [n, K] whether each is the target's most
    likely token. weights: [n] about how often a tree reaches the passage's token at this depth: the
    product of min(1, q/p) over the levels above.
    """
    params = SamplingParams(1.0)
    weight = torch.empty(0, dtype=torch.float32, device="cpu")
    for step in steps:
        p = compute_probs(step.target, params)
        q = compute_probs(step.draft, params)
        if step.number == 1:
            weight = torch.ones(len(q), device=q.device, dtype=torch.float32)
        top = q[step.chosen].topk(min(CALIBRATED_RANKS, q.shape[-1]))
        hits = top.indices == p[step.chosen].argmax(-1, keepdim=True)
        features = build_calibration_features(top.values.double().cpu().numpy(), step.number - 1)
        yield torch.from_numpy(features), hits.double().cpu(), weight[step.chosen].cpu()
        next_tokens = step.tokens[:, None]
        ratio = q.gather(1, next_tokens) / p.gather(1, next_tokens).clamp(min=1e-9)
        weight = weight * ratio.squeeze(1).clamp(max=1)


def fit_logistic(x: Tensor, y: Tensor, weight: Tensor, steps: int = 30) -> Tensor:
    """Fit a logistic regression by Newton's method. Returns its [f] coefficients.

    A step that raises the loss is halved: on few rows full steps may diverge.

    Args:
        x: [..., f] features.
        y: [...] shares in [0, 1].
        weight: Of each row; broadcast to y.
        steps: Of Newton's method. Default: 30.
    """
    x = x.double().flatten(0, -2)
    weight = weight.double().expand_as(y).flatten()
    y = y.double().flatten()
    weight = weight / weight.sum()
    ridge = 1e-6 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    solution = x.new_zeros(x.shape[1])

    def loss(coefficients: Tensor) -> Tensor:
        scores = x @ coefficients
        return weight @ (softplus(scores) - y * scores) + coefficients @ ridge @ coefficients / 2

    for _ in range(steps):
        share = torch.sigmoid(x @ solution)
        gradient = x.T @ (weight * (share - y)) + ridge @ solution
        hessian = (x.T * (weight * share * (1 - share))) @ x + ridge
        step = torch.linalg.solve(hessian, gradient)
        while loss(solution - step) > loss(solution):
            step = step / 2
        solution = solution - step
    return solution


@torch.no_grad()
def predict_draw_rates(steps: Iterable[CalibrationStep]) -> dict[str, tuple[float, ...]]:
    """Compute, along passages, how often the k-th draw without replacement is accepted, by temperature.

    The scheme's plan says for drawn tokens how likely each is the output. Deeper draft steps count as often as a tree
    reaches them: by the product of min(1, q/p) over the levels above.

    steps: from `iterate_draft_steps`. Returns the rates of `Calibration.rates`.
    """
    scheme = RRSWithoutReplacement()
    temperatures = (GREEDY_TEMPERATURE,) + CALIBRATED_TEMPERATURES
    accepted = torch.zeros(len(temperatures), RATE_DRAWS, dtype=torch.float64, device="cpu")
    total = torch.zeros(len(temperatures), 1, dtype=torch.float64, device="cpu")
    weights = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(temperatures)
    generator = None
    for step in steps:
        if generator is None:
            generator = torch.Generator(step.draft.device).manual_seed(0)
        for i, temperature in enumerate(temperatures):
            params = SamplingParams(temperature)
            p = compute_probs(step.target, params)
            q = compute_probs(step.draft, params)
            if step.number == 1:
                weights[i] = torch.ones(len(q), device=q.device, dtype=torch.float32)
            chosen_p = p[step.chosen]
            chosen_q = q[step.chosen]
            draws = scheme.draw(chosen_q, RATE_DRAWS, generator)
            plan = scheme.plan(chosen_p, chosen_q, draws)
            kept = plan.gather(1, draws.tokens.clamp(min=0)) * (draws.tokens >= 0)  # [n, draws]
            weight = weights[i][step.chosen]
            accepted[i] += (kept * weight[:, None]).sum(0).cpu()
            total[i] += weight.sum().cpu()
            next_tokens = step.tokens[:, None]
            ratio = q.gather(1, next_tokens) / p.gather(1, next_tokens).clamp(min=1e-9)
            weights[i] = weights[i] * ratio.squeeze(1).clamp(max=1)
    rates = accepted / total.clamp(min=1e-9)
    named = zip(temperatures, rates.tolist(), strict=True)
    return {f"{temperature:g}": tuple(row) for temperature, row in named}


def measure_draw_rates(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    calibration: Calibration | None = None,
    tokens: int = RATE_TOKENS,
    end: float = math.inf,
) -> tuple[float, ...]:
    """Count, over completions of prompts, how often the k-th draw without replacement is accepted.

    Args:
        target: The model that answers.
        proposer: The draft model.
        prompts: Token ids, at least one each.
        temperature: Of the completions; at least GREEDY_TEMPERATURE is used.
        calibration: The head's, for the sharpness of its logits. Default: none.
        tokens: The most tokens of a completion. Default: 48.
        end: The time of `time.monotonic` after which no further completion begins. Default: none.

    Returns:
        [K] probability that the k-th draw is accepted. Draws that were never verified have no rate.
    """
    tree = build_eagle_tree()
    if proposer.max_depth:
        tree = tree.cut(proposer.max_depth)
    verified = torch.zeros(tree.max_draws, dtype=torch.float64, device="cpu")
    accepted = torch.zeros(tree.max_draws, dtype=torch.float64, device="cpu")

    def count(cycle: CycleRecord) -> None:
        drafts = cycle.tree.drafts
        draws_at: dict[int, Tensor] = {}  # the draws [K] at each inner node
        if drafts:
            draws_at = dict(zip(drafts.nodes.tolist(), drafts.draws.tokens.cpu(), strict=True))
        path = [0] + list(cycle.verdict.path)
        for node, token in zip(path, cycle.verdict.tokens, strict=True):
            if node in draws_at:
                hits = (draws_at[node] == token).double()
                verified.add_((draws_at[node] >= 0) * (1 - hits.cumsum(0) + hits))
                accepted.add_(hits)

    # 1. Decode and count.
    spec = Spec(target, proposer, tree, "rrs-wo", calibration=calibration)
    for seed, prompt in enumerate(prompts):
        if seed and time.monotonic() > end:
            break
        request = spec.request(
            list(prompt),
            seed=seed,
            temperature=max(temperature, GREEDY_TEMPERATURE),
            max_new_tokens=tokens,
        )
        request.listener = count
        list(spec.decoder.run([request]))

    # 2. From rates given that earlier draws were refused, to unconditional ones.
    rates = (accepted / verified)[verified > 0]
    return tuple((rates * pad((1 - rates).cumprod(0), (1, -1), value=1)).tolist())
