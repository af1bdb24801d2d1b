"""Diagnose a draft head: how often it drafts the target's token, and which change to its inputs improves that.

A head that gets other inputs than it was trained on drafts badly without any error. So each usual fault is undone on
trial, on the target's own completions. If the head then agrees with the target far more often, it was trained on those
inputs. If no change helps, it was trained too little, or on another target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

from treespec.api.calibrate import Row
from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, load_full_vocabulary_head, roll_out_drafts
from treespec.errors import InputError
from treespec.eval.ablations import FaultTrial, iterate_fault_trials
from treespec.eval.common import ProgressStep, ignore_report
from treespec.eval.common import Report as Say
from treespec.eval.config import DoctorConfig
from treespec.eval.diagnosis import write_diagnosis
from treespec.eval.first_drafts import CERTAIN_TARGET_PROBABILITY, FirstStep, draft_first_step
from treespec.eval.fit import iterate_feature_rows
from treespec.eval.intervals import compute_needed_errors, compute_t_quantile
from treespec.eval.report import EvalPage, EvalReport, Table
from treespec.eval.texts import Passage, describe, iterate_passages, load_models
from treespec.eval.training_text import diagnose_training_text

# Agreement is the share of drafts that are the target's most likely token.
DOCTOR_STEPS = 4  # draft steps that are measured
MIN_COMPLETIONS = 2  # a standard error needs two
MIN_GAIN_SHARE = 0.005  # a change that raises agreement by less names no fault
WHOLE_FAULT_SHARE = 0.1  # a change that raises agreement by so much explains the whole fault
MIN_LOG_Q = -14.0  # log q is clamped here: a draft vocabulary may lack the token
# If mean confidence exceeds agreement by this factor, the head has another target.
OVERCONFIDENCE_RATIO = 2.0
MIN_FEATURE_GAIN = 0.05  # agreement that the right features add to the tokens' own, at least
MIN_CERTAIN_AGREEMENT = 0.8  # agreement where the target is certain; published heads have more
# Ratio of accepted drafts, sharper over calibrated, that makes a new factor pay.
MIN_SHARPENING_GAIN = 1.03
NO_FAULT = "No usual fault shows"


def examine(config: DoctorConfig, say: Say = ignore_report) -> EvalPage:
    """Diagnose a head on the target's own completions, or on `--text`; write OUT, a page of HTML, and its JSON.

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
    text_tables, text_verdict = diagnose_training_text(config, spec, say)
    verdict += text_verdict
    if not verdict:
        verdict = [f"{NO_FAULT} in {len(completions)} completions."]
    report = EvalReport(tables + text_tables, [DOCTOR_NOTE], verdict)
    return write_diagnosis(config, describe(target), len(completions), report)


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
    if first_step.least_sharper > MIN_SHARPENING_GAIN:
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
        order = torch.randperm(len(tokens), generator=generator, device="cpu")
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
    first_step: FirstStep,
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

    def measure_gain(tried_fault: TriedFault) -> float:
        return float((tried_fault.agreement.shares - agreement.shares).mean())

    best_fault = max(tried_faults, key=measure_gain)
    gain = measure_gain(best_fault)
    log_q_gains = (best_fault.agreement.log_q - agreement.log_q).mean(1)  # by completion
    needed_errors = compute_needed_errors(len(log_q_gains))
    is_certain = gain > MIN_GAIN_SHARE and compute_mean_floor(log_q_gains, needed_errors) > 0
    best_shares = agreement.shares
    if is_certain:
        best_shares = best_fault.agreement.shares

    # 2. A head of another target is confident and wrong, and no change helps.
    most_right = compute_share_ceiling(first_step.right, first_step.positions)
    is_overconfident = first_step.claimed > OVERCONFIDENCE_RATIO * most_right
    is_astray = is_overconfident and first_step.claimed - most_right > 2 * gain
    missing_shares = MIN_FEATURE_GAIN - (best_shares - blind_agreement.shares).mean(1)
    is_blind = compute_mean_floor(missing_shares, compute_t_quantile(len(missing_shares) - 1)) > 0
    if is_blind or is_astray:
        yield (
            f"Untrained, or for another target: confidence {first_step.claimed:.1%}, agreement "
            f"{first_step.right:.1%}. Was it trained on this very checkpoint?"
        )
        return

    # 3. A fault, or too little training.
    if is_certain:
        fault = best_fault.trial.fault
        change = best_fault.trial.change
        yield f"{fault}: {share + gain:.1%} of the drafts agree with {change}, {share:.1%} as it is."
    most_right_where_sure = compute_share_ceiling(
        first_step.right_where_sure, first_step.sure_positions
    )
    if most_right_where_sure < MIN_CERTAIN_AGREEMENT and gain < WHOLE_FAULT_SHARE:
        yield (
            f"Little trained: where the target is at least {CERTAIN_TARGET_PROBABILITY:.0%} sure, "
            f"{first_step.right_where_sure:.1%} of the first drafts agree, and no change helps much. "
            "Train on more of the target's own completions: treespec regenerate, then treespec train --from-head."
        )


def compute_mean_floor(values: Tensor, errors: float) -> float:
    """Return the mean of values [C] minus `errors` standard errors, estimated from the spread of the values."""
    return float(values.mean() - errors * values.std() / len(values) ** 0.5)


def compute_share_ceiling(share: float, positions: int) -> float:
    """Return the upper end of the exact 95 % interval of a share measured at `positions` positions.

    Wilson's interval is too short where positions are few: of two wrong drafts it would tell little training.
    """
    interval = binomtest(round(share * positions), positions).proportion_ci(method="exact")
    return float(interval.high)
