"""Find what is wrong with a head: how often it drafts the target's token, and which change makes that more often.

A head that was trained on other inputs than it gets drafts badly, and nothing fails. So each usual fault
is undone on trial, on the target's own completions: if the head then agrees with the target far more
often, that is what it learnt on. Where nothing helps, it learnt too little, or on another target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.api.calibrate import Row, drafted, sharpest
from treespec.api.spec import Spec
from treespec.draft.heads.loading import draft_steps, plain_head, rollout
from treespec.errors import InputError
from treespec.eval.ablations import Trial, trials
from treespec.eval.common import Report as Say
from treespec.eval.common import Step, silent
from treespec.eval.config import DoctorConfig
from treespec.eval.fit import rows_of
from treespec.eval.report import Report, Table, page
from treespec.eval.texts import Passage, load_models, passages_of
from treespec.eval.training_text import told
from treespec.files.atomic import write_text
from treespec.sampling.probs import SamplingParams, probs

DEPTH = 4  # draft steps
HELPS = 0.005  # of the drafts: a change after which more than these agree may name a fault
EXPLAINS = 0.1  # of the drafts: a change that helps so much is the whole fault
CERTAIN = 3.5  # standard errors of the gain in log q, over completions: a dozen changes are tried
LEAST = -14.0  # of log q, where a head has no such token
ASTRAY = 2.0  # times that a head's drafts agree: one that is so sure of them learnt another target
BLIND = 0.05  # of the drafts: what features have to add to the tokens alone
SURE = 0.9  # of the target's probability
LEARNT = 0.8  # of the sure positions at which a trained head agrees; published heads do at more
FLAT = 1.03  # times the drafts that sharper logits let be accepted, from which on they pay
ALL = 10**6  # positions


def examine(config: DoctorConfig, say: Say = silent) -> Report:
    """Diagnose a head on the target's own completions, or on `--text`. Writes OUT, a page of HTML.

    Raises InputError for models and texts that cannot be used.
    """
    # 1. The head without a draft vocabulary.
    loaded = load_models(config, config.head, config.out, say)
    target = loaded.target
    spec = Spec(target, plain_head(config.head, target), template=config.template)

    # 2. Completions of the target.
    completions = []
    for passage in passages_of(config, spec, say):
        if int(passage.counts.sum()) > 2 * DEPTH:
            completions.append(passage)
    if len(completions) < 2:
        raise InputError("the completions are too short or too few: give more of them")

    # 3. The findings.
    tables, verdict = diagnosed(spec, completions, loaded.sharpness, say)
    text_tables, text_verdict = told(config, spec, completions, say)
    verdict += text_verdict
    if not verdict:
        verdict = ["No usual fault shows."]
    report = Report(tables + text_tables, [NOTE], verdict)
    write_text(config.out, page(report, "Head doctor", f"{config.head} for {config.target}"))
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

    trial: Trial
    agreement: Agreement


def diagnosed(
    spec: Spec,
    passages: Sequence[Passage],
    sharpness: tuple[float, ...] = (),
    say: Say = silent,
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
    rows = list(rows_of(spec, passages))
    agreement = agreeing(spec, rows)
    tried = list[TriedFault]()
    for number, trial in enumerate(trials(spec, passages, rows)):
        say(Step(number, number + 1, f"trying {trial.change}"))
        tried.append(TriedFault(trial, agreeing(trial.spec, trial.rows)))
    blind = agreeing(spec, shuffle_features(rows))

    # 2. By certainty of the target, and by how much sharper drafts would be accepted more often.
    first = first_step(spec, rows, sharpness)
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
    verdict = list(causes(agreement, tried, blind, first))
    if first.sharper > FLAT:
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


NOTE = (
    "Agreement: how often the draft is the target's most likely token, along the target's own greedy "
    "completions, or --text. A change that helps is what the head was trained with. With features of other positions "
    "a head knows the tokens alone."
)


@torch.no_grad()
def agreeing(spec: Spec, rows: Sequence[Row]) -> Agreement:
    """Measure how often the drafts of the spec's head are the target's most likely token. rows: of C completions."""
    head = spec.head
    target = spec.target
    assert head
    depth = draft_steps(head, DEPTH)
    shares = list[Tensor]()
    log_q = list[Tensor]()
    for tokens, counts, all_features in rows:
        features, last = target.parted(all_features, head.aux_layers)
        target_tokens = target.output_logits(last).argmax(-1)
        for d, logits in enumerate(rollout(head, target, tokens, features, depth), 1):
            chosen = counts[d + 1 : d + 1 + len(logits)].nonzero().squeeze(1)
            log_probs = logits[chosen].log_softmax(-1)
            wanted = target_tokens[chosen + d, None]
            agrees = log_probs.argmax(-1, keepdim=True) == wanted
            shares.append(agrees.double().mean())
            log_q.append(log_probs.gather(1, wanted).clamp(min=LEAST).double().mean())
    return Agreement(
        torch.stack(shares).view(len(rows), -1).cpu(), torch.stack(log_q).view(len(rows), -1).cpu()
    )


def causes(
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
    is_certain = gain > HELPS and float(log_q_gains.mean()) > CERTAIN * error
    certain_gain = gain if is_certain else 0.0

    # 2. A head of another target is sure of itself and wrong, and no change mends that.
    is_overconfident = first.claimed > ASTRAY * first.right
    is_astray = is_overconfident and first.claimed - first.right > 2 * gain
    if share + certain_gain < blind_share + BLIND or is_astray:
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
    if first.right_where_sure < LEARNT and gain < EXPLAINS:
        yield (
            f"Little trained: where the target is at least {SURE:.0%} sure, {first.right_where_sure:.1%} of the "
            "first drafts agree, and no change helps much. Train on more of the target's own completions: "
            "treespec regenerate, then treespec train --from-head."
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


def first_step(spec: Spec, rows: Sequence[Row], sharpness: tuple[float, ...]) -> FirstStep:
    """Measure the first drafts on rows. sharpness: the factors of a calibration."""
    # 1. By position.
    params = SamplingParams(1.0)
    calibrated_factor = sharpness[0] if sharpness else 1.0
    head = spec.head
    assert head is not None
    (sharpest_factor,) = sharpest(head, spec.target, rows, 1, ALL)
    parts = list[FirstDrafts]()
    for step in drafted(head, spec.target, rows, 1, ALL):
        p = probs(step.target[step.chosen], params)
        logits = step.draft[step.chosen]
        q = probs(logits, params)
        calibrated = probs(logits * calibrated_factor, params)
        sharp = probs(logits * sharpest_factor, params)
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
    agrees_where_sure = drafts.agrees[drafts.target_top >= SURE]
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
    for low, high in ((0, 0.5), (0.5, SURE), (SURE, 1.01)):
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
