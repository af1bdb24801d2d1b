"""Find what is wrong with a head: how often it drafts the target's token, and which change makes that more often.

A head that was trained on other inputs than it gets drafts badly, and nothing fails. So each usual fault
is undone on trial, on the target's own completions: if the head then agrees with the target far more
often, that is what it learnt on. Where nothing helps, it learnt too little, or on another target.
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

DOCTOR_STEPS = 4  # draft steps
MIN_GAIN_SHARE = 0.005  # of the drafts: a change after which more than these agree may name a fault
WHOLE_FAULT_SHARE = 0.1  # of the drafts: a change that helps so much is the whole fault
MIN_GAIN_ERRORS = (
    3.5  # standard errors of the gain in log q, over completions: a dozen changes are tried
)
MIN_LOG_Q = -14.0  # of log q, where a head has no such token
OVERCONFIDENCE_RATIO = (
    2.0  # times that a head's drafts agree: one that is so sure of them learnt another target
)
MIN_FEATURE_GAIN = 0.05  # of the drafts: what features have to add to the tokens alone
CERTAIN_TARGET_PROBABILITY = 0.9  # of the target's probability
MIN_CERTAIN_AGREEMENT = (
    0.8  # of the sure positions at which a trained head agrees; published heads do at more
)
MIN_SHARPENING_GAIN = (
    1.03  # times the drafts that sharper logits let be accepted, from which on they pay
)
ALL_POSITIONS = 10**6  # positions


def examine(config: DoctorConfig, say: Say = ignore_report) -> EvalReport:
    """Diagnose a head on the target's own completions, or on `--text`. Writes OUT, a page of HTML.

    Raises InputError for models and texts that cannot be used.
    """
    # 1. The head without a draft vocabulary.
    loaded = load_models(config, config.head, config.out, say)
    target = loaded.target
    spec = Spec(target, load_full_vocabulary_head(config.head, target), template=config.template)

    # 2. Completions of the target.
    completions = []
    for passage in iterate_passages(config, spec, say):
        if int(passage.counts.sum()) > 2 * DOCTOR_STEPS:
            completions.append(passage)
    if len(completions) < 2:
        raise InputError("the completions are too short or too few: give more of them")

    # 3. The findings.
    tables, verdict = diagnose_head(spec, completions, loaded.sharpness, say)
    text_tables, text_verdict = diagnose_training_text(config, spec, completions, say)
    verdict += text_verdict
    if not verdict:
        verdict = ["No usual fault shows."]
    report = EvalReport(tables + text_tables, [DOCTOR_NOTE], verdict)
    write_text(config.out, render_page(report, "Head doctor", f"{config.head} for {config.target}"))
    return report


@dataclass(frozen=True)
class Agreement:
    """How well a head drafts along C completions, at D draft steps.

    shares: [C, D] of the drafts that are the target's token. log_q: [C, D] the mean log q of that token, in nats.
    """

    shares: Tensor
    log_q: Tensor


@dataclass(frozen=True)
class TriedFault:
    """A usual fault of a head's inputs, and how well the head drafts where it is undone."""

    trial: FaultTrial
    agreement: Agreement


def diagnose_head(
    spec: Spec,
    passages: Sequence[Passage],
    sharpness: tuple[float, ...] = (),
    say: Say = ignore_report,
) -> tuple[list[Table], list[str]]:
    """Diagnose the spec's head: measure its agreement with the target as it is, and with each usual fault undone.

    Args:
        spec: the target and the head.
        passages: the target's completions.
        sharpness: a calibration's factors.
        say: hears of progress.

    Returns:
        Tables of the agreement, and the faults that they show, a sentence each.
    """
    # 1. As it is, with each fault undone, and with features that say nothing.
    rows = list(iterate_feature_rows(spec, passages))
    agreement = measure_agreement(spec, rows)
    tried = list[TriedFault]()
    for number, trial in enumerate(iterate_fault_trials(spec, passages, rows)):
        say(ProgressStep(number, number + 1, f"trying {trial.change}"))
        tried.append(TriedFault(trial, measure_agreement(trial.spec, trial.rows)))
    blind = measure_agreement(spec, shuffle_features(rows))

    # 2. By certainty of the target, and by how much sharper drafts would be accepted more often.
    first = draft_first_step(spec, rows, sharpness)
    lines = {"as it is": agreement}
    for fault in tried:
        lines[fault.trial.change] = fault.agreement
    lines["features of other positions"] = blind
    by_certainty = "At the first step, by the target's largest probability"
    tables = [
        Table("Agreement with the target", ["inputs"], make_agreement_cells(lines)),
        Table(by_certainty, ["probability"], first.bins),
    ]

    # 3. What it says.
    verdict = list(explain_causes(agreement, tried, blind, first))
    if first.sharper > MIN_SHARPENING_GAIN:
        verdict.append(
            f"Flat: sharper drafts would be accepted {first.sharper - 1:.1%} more often at temperature 1. Run treespec "
            "calibrate, which fits the factor."
        )
    return tables, verdict


def shuffle_features(rows: Sequence[Row]) -> list[Row]:
    """The rows with each text's features in a random order: a head then knows the tokens only."""
    generator = torch.Generator().manual_seed(0)
    shuffled = []
    for tokens, counts, features in rows:
        order = torch.randperm(len(tokens), generator=generator)
        shuffled.append((tokens, counts, features[order]))
    return shuffled


def make_agreement_cells(lines: Mapping[str, Agreement]) -> list[dict[str, str]]:
    """Table rows of the shares by draft step. lines: agreement by the inputs of the head."""
    cells = []
    for inputs, agreement in lines.items():
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
    """Measure how often the drafts of the spec's head are the target's most likely token. rows: of C completions."""
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
            chosen = counts[d + 1 : d + 1 + len(logits)].nonzero().squeeze(1)
            log_probs = logits[chosen].log_softmax(-1)
            wanted = target_tokens[chosen + d, None]
            agrees = log_probs.argmax(-1, keepdim=True) == wanted
            shares.append(agrees.double().mean())
            log_q.append(log_probs.gather(1, wanted).clamp(min=MIN_LOG_Q).double().mean())
    return Agreement(
        torch.stack(shares).view(len(rows), -1).cpu(), torch.stack(log_q).view(len(rows), -1).cpu()
    )


def explain_causes(
    agreement: Agreement, tried: Sequence[TriedFault], blind: Agreement, first: "FirstStep"
) -> Iterator[str]:
    """Name the faults that figures show, if any.

    Args:
        agreement: of the head as it is.
        tried: with each usual fault undone.
        blind: with features of other positions, which say nothing.
        first: figures of the first drafts.
    """
    # 1. The change that helps most. Log q is less noisy than agreement, so that says whether it is certain.
    share = float(agreement.shares.mean())
    blind_share = float(blind.shares.mean())

    def measure_gain(one: TriedFault) -> float:
        return float((one.agreement.shares - agreement.shares).mean())

    best = max(tried, key=measure_gain)
    gain = measure_gain(best)
    log_q_gains = (best.agreement.log_q - agreement.log_q).mean(1)  # by completion
    error = float(log_q_gains.std()) / len(log_q_gains) ** 0.5
    is_certain = gain > MIN_GAIN_SHARE and float(log_q_gains.mean()) > MIN_GAIN_ERRORS * error
    certain_gain = gain if is_certain else 0.0

    # 2. A head of another target is sure of itself and wrong, and no change mends that.
    is_overconfident = first.claimed > OVERCONFIDENCE_RATIO * first.right
    is_astray = is_overconfident and first.claimed - first.right > 2 * gain
    if share + certain_gain < blind_share + MIN_FEATURE_GAIN or is_astray:
        yield (
            f"Another target's weights, or an untrained head: it is {first.claimed:.1%} sure of its first "
            f"drafts, and {first.right:.1%} of them agree. Was it trained on this very checkpoint?"
        )
        return

    # 3. A fault, or too little training.
    if is_certain:
        fault = best.trial.fault
        change = best.trial.change
        yield f"{fault}: {share + gain:.1%} of the drafts agree with {change}, {share:.1%} as it is."
    if first.right_where_sure < MIN_CERTAIN_AGREEMENT and gain < WHOLE_FAULT_SHARE:
        yield (
            f"Little trained: where the target is at least {CERTAIN_TARGET_PROBABILITY:.0%} sure, "
            f"{first.right_where_sure:.1%} of the first drafts agree, and no change helps much. "
            "Train on more of the target's own completions: treespec regenerate, then treespec train --from-head."
        )


@dataclass(frozen=True)
class FirstStep:
    """Figures of the first drafts.

    bins: cells by the target's largest probability. claimed: the head's largest probability, on average. right,
    right_where_sure: agreement, and where the target is sure. sharper: accepted drafts of sharper logits, over those of
    the calibration.
    """

    bins: list[dict[str, str]]
    claimed: float
    right: float
    right_where_sure: float
    sharper: float


@dataclass(frozen=True)
class FirstDrafts:
    """The first drafts at n positions; each is [n].

    target_top, head_top: the largest probability of target and head. agrees: 1 where both have the same most likely
    token, else 0. accepted, accepted_sharper: Pr(a draft is accepted) at temperature 1, as calibrated and sharper.
    """

    target_top: Tensor
    head_top: Tensor
    agrees: Tensor
    accepted: Tensor
    accepted_sharper: Tensor

    @classmethod
    def concat(cls, parts: Sequence["FirstDrafts"]) -> "FirstDrafts":
        """The positions of all parts, one part after another."""
        return cls(
            target_top=torch.cat([part.target_top for part in parts]),
            head_top=torch.cat([part.head_top for part in parts]),
            agrees=torch.cat([part.agrees for part in parts]),
            accepted=torch.cat([part.accepted for part in parts]),
            accepted_sharper=torch.cat([part.accepted_sharper for part in parts]),
        )


def draft_first_step(spec: Spec, rows: Sequence[Row], sharpness: tuple[float, ...]) -> FirstStep:
    """Measure the first drafts on rows. sharpness: the factors of a calibration."""
    # 1. By position.
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

    # 2. In all, and where the target is sure.
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
    """Table rows of the first drafts by the target's largest probability."""
    rows = []
    for low, high in (
        (0, 0.5),
        (0.5, CERTAIN_TARGET_PROBABILITY),
        (CERTAIN_TARGET_PROBABILITY, 1.01),
    ):
        here = (drafts.target_top >= low) & (drafts.target_top < high)
        if here.any():
            row = {
                "probability": f"{low:g} to {min(high, 1):g}",
                "positions": f"{here.float().mean():.1%}",
                "agreement": f"{drafts.agrees[here].mean():.1%}",
                "the head's own probability": f"{drafts.head_top[here].mean():.1%}",
                "accepted at temperature 1": f"{drafts.accepted[here].mean():.1%}",
            }
            rows.append(row)
    return rows
