"""What is wrong with a head: how often it names the target's token, and what would make that more often.

A head that was trained on other inputs than it gets drafts badly, and nothing fails. So each usual fault
is undone on trial, on the target's own completions: if the head then agrees with the target far more
often, that is what it learnt on. Where nothing helps, it learnt too little, or on another target.
"""

from collections.abc import Iterator, Sequence
from operator import add
from typing import NamedTuple

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
    """`diagnosed` on the target's own completions, or on `--text`. Writes OUT.

    Raises InputError for models and texts that cannot be used.
    """
    # 1. The head without a draft vocabulary.
    known = load_models(config, config.head, config.out, say)
    target = known.target
    spec = Spec(target, plain_head(config.head, target), template=config.template)

    # 2. Completions of the target.
    own = [one for one in passages_of(config, spec, say) if int(one.counts.sum()) > 2 * DEPTH]
    if len(own) < 2:
        raise InputError("the completions are too short or too few: give more of them")

    # 3. The findings.
    tables, verdict = map(
        add, diagnosed(spec, own, known.sharpness, say), told(config, spec, own, say)
    )
    report = Report(tables, [NOTE], verdict or ["No usual fault shows."])
    write_text(config.out, page(report, "Head doctor", f"{config.head} for {config.target}"))
    return report


def diagnosed(
    spec: Spec,
    passages: Sequence[Passage],
    sharpness: tuple[float, ...] = (),
    say: Say = silent,
) -> tuple[list[Table], list[str]]:
    """The agreement of the spec's head with its target, with and without each trial, and what it says.

    passages: the target's completions. sharpness: a calibration's.
    """
    # 1. As it is, with each fault undone, and with features that say nothing.
    rows = list(rows_of(spec, passages))

    own = agreeing(spec, rows)
    tried = list[tuple[Trial, Tensor]]()
    for number, trial in enumerate(trials(spec, passages, rows)):
        say(Step(number, number + 1, f"trying {trial.change}"))
        tried.append((trial, agreeing(trial.spec, trial.rows)))
    random = torch.Generator().manual_seed(0)
    lost = agreeing(
        spec, [(t, c, known[torch.randperm(len(t), generator=random)]) for t, c, known in rows]
    )

    # 2. By certainty of the target, and by how much sharper drafts would be accepted more often.
    first = first_step(spec, rows, sharpness)
    lines = {"as it is": own} | {trial.change: rates for trial, rates in tried}
    lines["features of other positions"] = lost
    table = [
        {"inputs": what}
        | {f"step {d}": f"{rate:.1%}" for d, rate in enumerate(rates[..., 0].mean(0).tolist(), 1)}
        for what, rates in lines.items()
    ]
    tables = [
        Table("Agreement with the target", ["inputs"], table),
        Table(
            "At the first step, by the target's largest probability", ["probability"], first.bins
        ),
    ]

    # 3. What it says.
    verdict = [*causes(own, tried, lost, first)]
    if first.sharper > FLAT:
        verdict.append(
            f"Flat: sharper drafts would be accepted {first.sharper - 1:.1%} more often at temperature 1. Run treespec "
            "calibrate, which fits the factor."
        )
    return tables, verdict


NOTE = (
    "Agreement: how often the draft is the target's most likely token, along the target's own greedy "
    "completions, or --text. A change that helps is what the head was trained with. With features of other positions "
    "a head knows the tokens alone."
)


@torch.no_grad()
def agreeing(spec: Spec, rows: Sequence[Row]) -> Tensor:
    """[completions, D, 2]: the share of drafts that are the target's token, and the mean log q of that token."""
    head = spec.head
    target = spec.target
    found = list[Tensor]()
    assert head
    for tokens, counts, known in rows:
        features, last = target.parted(known, head.aux_layers)
        wanted = target.output_logits(last).argmax(-1)
        steps = list[Tensor]()
        for d, logits in enumerate(
            rollout(head, target, tokens, features, draft_steps(head, DEPTH)), 1
        ):
            chosen = counts[d + 1 : d + 1 + len(logits)].nonzero().squeeze(1)
            own = logits[chosen].log_softmax(-1)
            token = wanted[chosen + d, None]
            both = own.argmax(-1, keepdim=True) == token, own.gather(1, token).clamp(min=LEAST)
            steps.append(torch.cat(both, 1).double().mean(0))
        found.append(torch.stack(steps))
    return torch.stack(found).cpu()


def causes(
    own: Tensor, tried: Sequence[tuple[Trial, Tensor]], lost: Tensor, first: "FirstStep"
) -> Iterator[str]:
    """The fault that figures show, if any. own, lost, those of trials: `agreeing` [completions, D, 2]."""
    # 1. The change that helps most. Log q is less noisy than agreement, so that says whether it is certain.
    mean = float(own[..., 0].mean())
    blind = float(lost[..., 0].mean())
    gains = [(rates - own).mean(1) for _, rates in tried]
    best = max(range(len(tried)), key=lambda i: float(gains[i][:, 0].mean()))
    gain, likelier = gains[best].mean(0).tolist()
    error = float(gains[best][:, 1].std()) / len(own) ** 0.5
    certain = gain > HELPS and likelier > CERTAIN * error

    # 2. A head of another target is sure of itself and wrong, and no change mends that.
    astray = first.claimed > ASTRAY * first.right and first.claimed - first.right > 2 * gain
    if mean + gain * certain < blind + BLIND or astray:
        yield (
            f"Another target's weights, or an untrained head: it is {first.claimed:.1%} sure of its first "
            f"drafts, and {first.right:.1%} of them agree. Was it trained on this very checkpoint?"
        )
        return
    if certain:
        fault, change = tried[best][0][:2]
        yield f"{fault}: {mean + gain:.1%} of the drafts agree with {change}, {mean:.1%} as it is."
    if first.right_where_sure < LEARNT and gain < EXPLAINS:
        yield (
            f"Little trained: where the target is at least {SURE:.0%} sure, {first.right_where_sure:.1%} of the "
            "first drafts agree, and no change helps much. Train on more of the target's own completions: "
            "treespec regenerate, then treespec train --from-head."
        )


class FirstStep(NamedTuple):
    """What the first drafts show. claimed: the head's largest probability, on average.

    bins: by the target's largest probability. right, right_where_sure: agreement, and where the
    target is sure. sharper: accepted drafts of sharper logits, over those of the calibration.
    """

    bins: list[dict[str, str]]
    claimed: float
    right: float
    right_where_sure: float
    sharper: float


def first_step(spec: Spec, rows: Sequence[Row], sharpness: tuple[float, ...]) -> FirstStep:
    """The first drafts on rows. sharpness: the factors of a calibration."""
    # 1. By position: the largest probability of both, whether they agree, what is accepted as it is and sharper.
    params = SamplingParams(1.0)
    known = (sharpness or (1.0,))[0]
    head = spec.head
    assert head is not None
    (factor,) = sharpest(head, spec.target, rows, (1, ALL))
    columns = list[Tensor]()
    for step in drafted(head, spec.target, rows, (1, ALL)):
        p = probs(step.target[step.chosen], params)
        logits = step.draft[step.chosen]
        q, calibrated, sharp = (probs(logits * x, params) for x in (1.0, known, factor))
        same = (q.argmax(-1) == p.argmax(-1)).float()
        overlaps = (torch.minimum(p, x).sum(-1) for x in (calibrated, sharp))
        columns.append(torch.stack([p.amax(-1), q.amax(-1), same, *overlaps]))
    top, own, same, accepted, sharper = torch.cat(columns, 1)

    # 2. By the target's largest probability.
    bins = []
    for low, high in ((0, 0.5), (0.5, SURE), (SURE, 1.01)):
        if (here := (top >= low) & (top < high)).any():
            bins.append({
                "probability": f"{low:g} to {min(high, 1):g}",
                "positions": f"{here.float().mean():.1%}",
                "agreement": f"{same[here].mean():.1%}",
                "the head's own probability": f"{own[here].mean():.1%}",
                "accepted at temperature 1": f"{accepted[here].mean():.1%}",
            })  # fmt: skip
    right = same[top >= SURE] if (top >= SURE).any() else same
    rates = own.mean(), same.mean(), right.mean(), sharper.mean() / accepted.mean()
    return FirstStep(bins, *map(float, rates))
