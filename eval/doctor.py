"""Diagnose a draft head: how often it drafts the target's token, and which change to its inputs improves that.

A head that gets other inputs than it was trained on drafts badly without any error. So each usual fault is undone on
trial, on the target's own completions. If the head then agrees with the target far more often, it was trained on those
inputs. If no change helps, it was trained too little, or on another target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.api.calibrate import Row, fit_sharpness, iterate_draft_steps
from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, load_full_vocabulary_head, roll_out_drafts
from treespec.errors import InputError
from treespec.eval.ablations import FaultTrial, iterate_fault_trials
from treespec.eval.common import ProgressStep, ignore_report
from treespec.eval.common import Report as Say
from treespec.eval.config import DoctorConfig
from treespec.eval.fit import iterate_feature_rows
from treespec.eval.report import EvalReport, Table, render_page
from treespec.eval.texts import Passage, iterate_passages, load_models
from treespec.eval.training_text import diagnose_training_text
from treespec.files.atomic import write_text
from treespec.sampling.probs import SamplingParams, compute_probs

# Agreement is the share of drafts that are the target's most likely token.
DOCTOR_STEPS = 4  # draft steps that are measured
MIN_COMPLETIONS = 2  # a standard error needs two
MIN_GAIN_SHARE = 0.005  # a change that raises agreement by less names no fault
WHOLE_FAULT_SHARE = 0.1  # a change that raises agreement by so much explains the whole fault
MIN_GAIN_ERRORS = (
    3.5  # the gain in log q in standard errors over completions; a dozen changes are tried
)
MIN_LOG_Q = -14.0  # log q is clamped here: a draft vocabulary may lack the token
OVERCONFIDENCE_RATIO = (
    2.0  # if mean confidence exceeds agreement by this factor, the head has another target
)
MIN_FEATURE_GAIN = 0.05  # agreement that the right features add to the tokens' own, at least
CERTAIN_TARGET_PROBABILITY = 0.9  # the target is certain if its largest probability reaches this
MIN_CERTAIN_AGREEMENT = 0.8  # agreement where the target is certain; published heads have more
MIN_SHARPENING_GAIN = (
    1.03  # ratio of accepted drafts, sharper over calibrated, that makes a new factor pay
)
NO_FAULT = "No usual fault shows."
ALL_POSITIONS = 10**6  # more positions than any text has


def examine(config: DoctorConfig, say: Say = ignore_report) -> EvalReport:
    """Diagnose a head on the target's own completions, or on `--text`, and write OUT, a page of HTML.

    Raises InputError for models and texts that cannot be used.
    """
    # 1. The head without a draft vocabulary.
    loaded_spec = load_models(config, config.head, config.out, say)
    target = loaded_spec.target
    spec = Spec(target, load_full_vocabulary_head(config.head, target), template=config.template)

    # 2. Completions of the target.
    completions = []
    for passage in iterate_passages(config, spec, say):
        if int(passage.counts.sum()) > 2 * DOCTOR_STEPS:
            completions.append(passage)
    if len(completions) < MIN_COMPLETIONS:
        raise InputError(
            f"doctor needs at least {MIN_COMPLETIONS} answers of more than {2 * DOCTOR_STEPS} tokens, and got "
            f"{len(completions)}: give more --text or --questions, or a larger --max-new-tokens"
        )

    # 3. The findings.
    tables, verdict = diagnose_head(spec, completions, loaded_spec.sharpness, say)
    text_tables, text_verdict = diagnose_training_text(config, spec, completions, say)
    verdict += text_verdict
    if not verdict:
        verdict = [NO_FAULT]
    report = EvalReport(tables + text_tables, [DOCTOR_NOTE], verdict)
    write_text(config.out, render_page(report, "Head doctor", f"{config.head} for {config.target}"))
    return report


@dataclass(frozen=True)
class Agreement:
    """How well a head drafts along C completions, at D draft steps.

    Attributes:
        shares: [C, D] share of the drafts that are the target's most likely token.
        log_q: [C, D] mean log q of that token, in nats.
    """

    shares: Tensor
    log_q: Tensor


@dataclass(frozen=True)
class TriedFault:
    """A usual fault of a head's inputs, and how well the head drafts after it is undone."""

    trial: FaultTrial
    agreement: Agreement


def diagnose_head(
    spec: Spec,
    passages: Sequence[Passage],
    sharpness: tuple[float, ...] = (),
    say: Say = ignore_report,
) -> tuple[list[Table], list[str]]:
    """Measure a head's agreement with the target, unchanged and with each usual fault undone, and name its faults.

    Args:
        spec: the target and the head.
        passages: the target's completions.
        sharpness: factors on the draft logits by draft step, of the head's calibration; (): no calibration.
        say: called with the progress.

    Returns:
        Tables of the agreement, and a sentence for each fault that they show.
    """
    # 1. The head unchanged, with each fault undone, and with features of other positions.
    rows = list(iterate_feature_rows(spec, passages))
    agreement = measure_agreement(spec, rows)
    tried_faults = list[TriedFault]()
    for number, trial in enumerate(iterate_fault_trials(spec, passages, rows)):
        say(ProgressStep(number, number + 1, f"trying {trial.change}"))
        tried_faults.append(TriedFault(trial, measure_agreement(trial.spec, trial.rows)))
    blind_agreement = measure_agreement(spec, shuffle_features(rows))

    # 2. Agreement by the target's certainty, and how much more often sharper drafts would be accepted.
    first_step = draft_first_step(spec, rows, sharpness)
    agreement_by_inputs = {"as it is": agreement}
    for fault in tried_faults:
        agreement_by_inputs[fault.trial.change] = fault.agreement
    agreement_by_inputs["features of other positions"] = blind_agreement
    by_certainty = "At the first step, by the target's largest probability"
    tables = [
        Table("Agreement with the target", ["inputs"], make_agreement_cells(agreement_by_inputs)),
        Table(by_certainty, ["probability"], first_step.bins),
    ]

    # 3. The faults.
    verdict = list(explain_causes(agreement, tried_faults, blind_agreement, first_step))
    if first_step.sharper > MIN_SHARPENING_GAIN:
        verdict.append(
            f"Flat: sharper drafts would be accepted {first_step.sharper - 1:.1%} more often at temperature 1. Run "
            "treespec calibrate, which fits the factor."
        )
    return tables, verdict


def shuffle_features(rows: Sequence[Row]) -> list[Row]:
    """Shuffle the features of each text, so that a head's drafts can depend only on the tokens."""
    generator = torch.Generator().manual_seed(0)
    shuffled = []
    for tokens, counts, features in rows:
        order = torch.randperm(len(tokens), generator=generator)
        shuffled.append((tokens, counts, features[order]))
    return shuffled


def make_agreement_cells(agreement_by_inputs: Mapping[str, Agreement]) -> list[dict[str, str]]:
    """Make table rows of the agreement by draft step. agreement_by_inputs: by what inputs the head reads, in words."""
    cells = []
    for inputs, agreement in agreement_by_inputs.items():
        row = {"inputs": inputs}
        for step, share in enumerate(agreement.shares.mean(0).tolist(), 1):
            row[f"step {step}"] = f"{share:.1%}"
        cells.append(row)
    return cells


DOCTOR_NOTE = (
    "Agreement: how often the draft is the target's most likely token, along the target's own greedy "
    "completions, or --text. A change that helps is what the head was trained with. With features of other positions "
    "a head knows the tokens alone."
)


@torch.no_grad()
def measure_agreement(spec: Spec, rows: Sequence[Row]) -> Agreement:
    """Measure how often the head drafts the target's most likely token. rows: C completions with their features."""
    head = spec.head
    target = spec.target
    assert head
    depth = draft_steps(head, DOCTOR_STEPS)
    shares = list[Tensor]()
    log_q = list[Tensor]()
    for tokens, counts, all_features in rows:
        features, last = target.split_features(all_features, head.aux_layers)
        target_tokens = target.compute_output_logits(last).argmax(-1)
        for d, logits in enumerate(roll_out_drafts(head, target, tokens, features, depth), 1):
            positions = counts[d + 1 : d + 1 + len(logits)].nonzero().squeeze(1)
            log_probs = logits[positions].log_softmax(-1)
            next_tokens = target_tokens[positions + d, None]
            agrees = log_probs.argmax(-1, keepdim=True) == next_tokens
            shares.append(agrees.double().mean())
            log_q.append(log_probs.gather(1, next_tokens).clamp(min=MIN_LOG_Q).double().mean())
    return Agreement(
        torch.stack(shares).view(len(rows), -1).cpu(), torch.stack(log_q).view(len(rows), -1).cpu()
    )


def explain_causes(
    agreement: Agreement,
    tried_faults: Sequence[TriedFault],
    blind_agreement: Agreement,
    first_step: "FirstStep",
) -> Iterator[str]:
    """Yield a sentence for each fault that the figures show.

    Args:
        agreement: agreement of the unchanged head.
        tried_faults: agreement with each usual fault undone.
        blind_agreement: agreement with features of other positions, which carry no information.
        first_step: figures of the first drafts.
    """
    # 1. The change that helps most. Log q decides whether its gain is certain, as it is less noisy than agreement.
    share = float(agreement.shares.mean())
    blind_share = float(blind_agreement.shares.mean())

    def measure_gain(tried_fault: TriedFault) -> float:
        return float((tried_fault.agreement.shares - agreement.shares).mean())

    best_fault = max(tried_faults, key=measure_gain)
    gain = measure_gain(best_fault)
    log_q_gains = (best_fault.agreement.log_q - agreement.log_q).mean(1)  # by completion
    error = float(log_q_gains.std()) / len(log_q_gains) ** 0.5
    is_certain = gain > MIN_GAIN_SHARE and float(log_q_gains.mean()) > MIN_GAIN_ERRORS * error
    certain_gain = gain if is_certain else 0.0

    # 2. A head of another target is confident and wrong, and no change helps.
    is_overconfident = first_step.claimed > OVERCONFIDENCE_RATIO * first_step.right
    is_astray = is_overconfident and first_step.claimed - first_step.right > 2 * gain
    if share + certain_gain < blind_share + MIN_FEATURE_GAIN or is_astray:
        yield (
            f"Untrained, or for another target: confidence {first_step.claimed:.1%}, agreement {first_step.right:.1%} "
            "on first drafts. Was it trained on this very checkpoint?"
        )
        return

    # 3. A fault, or too little training.
    if is_certain:
        fault = best_fault.trial.fault
        change = best_fault.trial.change
        yield f"{fault}: {share + gain:.1%} of the drafts agree with {change}, {share:.1%} as it is."
    if first_step.right_where_sure < MIN_CERTAIN_AGREEMENT and gain < WHOLE_FAULT_SHARE:
        yield (
            f"Little trained: where the target is at least {CERTAIN_TARGET_PROBABILITY:.0%} sure, "
            f"{first_step.right_where_sure:.1%} of the first drafts agree, and no change helps much. "
            "Train on more of the target's own completions: treespec regenerate, then treespec train --from-head."
        )


@dataclass(frozen=True)
class FirstStep:
    """Figures of the drafts of step 1.

    Attributes:
        bins: table rows by the target's largest probability.
        claimed: mean of the head's largest probability.
        right: agreement with the target.
        right_where_sure: agreement where the target is certain.
        sharper: ratio of accepted drafts at temperature 1, sharper logits over calibrated ones.
    """

    bins: list[dict[str, str]]
    claimed: float
    right: float
    right_where_sure: float
    sharper: float


@dataclass(frozen=True)
class FirstDrafts:
    """The drafts of step 1 at n positions.

    Attributes:
        target_top: [n] the target's largest probability.
        head_top: [n] the head's largest probability.
        agrees: [n] 1 if both have the same most likely token, else 0.
        accepted: [n] Pr(a draft is accepted) at temperature 1, with the head's calibration.
        accepted_sharper: [n] the same with the factor that maximises it.
    """

    target_top: Tensor
    head_top: Tensor
    agrees: Tensor
    accepted: Tensor
    accepted_sharper: Tensor

    @classmethod
    def concat(cls, parts: Sequence["FirstDrafts"]) -> "FirstDrafts":
        """Concatenate the positions of all parts."""
        return cls(
            target_top=torch.cat([part.target_top for part in parts]),
            head_top=torch.cat([part.head_top for part in parts]),
            agrees=torch.cat([part.agrees for part in parts]),
            accepted=torch.cat([part.accepted for part in parts]),
            accepted_sharper=torch.cat([part.accepted_sharper for part in parts]),
        )


def draft_first_step(spec: Spec, rows: Sequence[Row], sharpness: tuple[float, ...]) -> FirstStep:
    """Measure the drafts of step 1 on `rows`. sharpness: factors of the head's calibration; (): no calibration."""
    # 1. Figures of each position.
    params = SamplingParams(1.0)
    calibrated_factor = sharpness[0] if sharpness else 1.0
    head = spec.head
    assert head is not None
    (sharpest_factor,) = fit_sharpness(head, spec.target, rows, 1, ALL_POSITIONS)
    parts = list[FirstDrafts]()
    for step in iterate_draft_steps(head, spec.target, rows, 1, ALL_POSITIONS):
        p = compute_probs(step.target[step.chosen], params)
        logits = step.draft[step.chosen]
        q = compute_probs(logits, params)
        calibrated = compute_probs(logits * calibrated_factor, params)
        sharp = compute_probs(logits * sharpest_factor, params)
        part = FirstDrafts(
            target_top=p.amax(-1),
            head_top=q.amax(-1),
            agrees=(q.argmax(-1) == p.argmax(-1)).to(p.dtype),
            accepted=torch.minimum(p, calibrated).sum(-1),
            accepted_sharper=torch.minimum(p, sharp).sum(-1),
        )
        parts.append(part)
    drafts = FirstDrafts.concat(parts)

    # 2. Their means, over all positions and over those where the target is certain.
    agrees_where_sure = drafts.agrees[drafts.target_top >= CERTAIN_TARGET_PROBABILITY]
    if len(agrees_where_sure) == 0:
        agrees_where_sure = drafts.agrees
    return FirstStep(
        bins=make_certainty_cells(drafts),
        claimed=float(drafts.head_top.mean()),
        right=float(drafts.agrees.mean()),
        right_where_sure=float(agrees_where_sure.mean()),
        sharper=float(drafts.accepted_sharper.mean() / drafts.accepted.mean()),
    )


def make_certainty_cells(drafts: FirstDrafts) -> list[dict[str, str]]:
    """Make table rows of the first drafts, by the target's largest probability."""
    rows = []
    for low, high in (
        (0, 0.5),
        (0.5, CERTAIN_TARGET_PROBABILITY),
        (CERTAIN_TARGET_PROBABILITY, 1.01),
    ):
        in_bin = (drafts.target_top >= low) & (drafts.target_top < high)
        if in_bin.any():
            row = {
                "probability": f"{low:g} to {min(high, 1):g}",
                "positions": f"{in_bin.float().mean():.1%}",
                "agreement": f"{drafts.agrees[in_bin].mean():.1%}",
                "the head's own probability": f"{drafts.head_top[in_bin].mean():.1%}",
                "accepted at temperature 1": f"{drafts.accepted[in_bin].mean():.1%}",
            }
            rows.append(row)
    return rows
