"""The cost model of one sequence while it is decoded: measured seconds, predicted and actual acceptance.

Seconds are modelled, not clocked: the choice of each cycle depends on the sequence's own past and on
the batch size.

A drafter predicts for each node Pr(it is accepted | its parent is). `Correction` is the ratio of actual to
predicted acceptances at the nodes that were reached: of first children and of the others apart, and of
the root's children and of deeper ones, because where one draft was right the next is right more often.

    root - a .6 - c .5       accepted: a, and the target's own token after it
         \\ b .2              predicted for the root's first child .6, actual 1; for its others .2, actual 0
                             predicted for deeper first children .5, actual 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from treespec.draft.auto.cost import CostBy, CycleCost

RATE_DECAY = 0.98  # weight of the cycles before, a cycle: sequences change their manner
# acceptances that rates fitted on text, and rates guessed, count for
FITTED_RATE_WEIGHT = 10.0
GUESSED_RATE_WEIGHT = 2.0
GUESSED_RATES = (0.7, 0.1, 0.05)  # rates of a drafter that nothing is known of
PRIOR_CYCLES = 4  # cycles that the first estimate of the speed counts for
# bounds of a correction
MIN_CORRECTION = 0.02
MAX_CORRECTION = 1.5
MAX_CHILD_PROBABILITY = 0.98  # the most that is believed of a child
RETRY_CYCLES = 8  # cycles without drafts before one is tried again, where drafting nearly pays
RETRY_POWER = 6  # that number grows with how far off drafting is, to this power


def limit_sum(probabilities: np.ndarray) -> np.ndarray:
    """[F, K] probabilities of children with a sum of at most CERTAIN: the others share what the first leaves.

    .9 .2 .1, at most .98    .9 and .08 for the others    .9 .053 .027
    """
    first = probabilities[:, :1].clip(max=MAX_CHILD_PROBABILITY)
    others = probabilities[:, 1:]
    left = MAX_CHILD_PROBABILITY - first
    wanted = others.sum(1, keepdims=True)
    share = left / np.maximum(wanted, left).clip(np.finfo(float).tiny)
    return np.concatenate([first, others * share], axis=1)


@final
class Correction:
    """Actual acceptances for each predicted one.

    predicted, accepted: [2, 2] of the root's children, and of deeper ones; of first children, and of others.
    """

    def __init__(self, weight: float) -> None:
        """weight: acceptances that the predictions themselves count for."""
        self.predicted = np.full((2, 2), weight)
        self.accepted = np.full((2, 2), weight)

    @property
    def factors(self) -> np.ndarray:
        """[2, 2] actual acceptances for one that was predicted."""
        return (self.accepted / self.predicted).clip(MIN_CORRECTION, MAX_CORRECTION)

    def correct_predictions(self, probabilities: np.ndarray, depth: int) -> np.ndarray:
        """[F, K] predictions for the children of F nodes, the most likely first, at the ratio seen so far.

        depth: of the nodes; 0 for the root.
        """
        is_other = np.arange(probabilities.shape[1]).clip(max=1)
        return limit_sum(probabilities * self.factors[min(depth, 1), is_other])

    def update(self, prediction: "Prediction", path: Sequence[int]) -> None:
        """A tree was verified. path: its accepted nodes, without the root."""
        self.predicted = RATE_DECAY * self.predicted
        self.accepted = RATE_DECAY * self.accepted
        for depth, node in enumerate([0, *path]):
            (children,) = np.nonzero(prediction.parents == node)
            if not len(children):
                continue
            row = min(depth, 1)
            probabilities = prediction.probabilities[children]
            self.predicted[row] += probabilities[0], sum(probabilities[1:])
            if depth < len(path):
                is_other = path[depth] != children[0]
                self.accepted[row, int(is_other)] += 1


@dataclass(frozen=True)
class Prediction:
    """About one cycle's tree. seconds: of the cycle, modelled.

    parents: [N] of each node. probabilities: [N] Pr(it is accepted | its parent is).
    """

    seconds: float
    parents: np.ndarray
    probabilities: np.ndarray


@final
class CostModel:
    """Of one sequence at one batch size.

    rates: Pr(the first, second, … child of a node is accepted), measured or guessed.
    by_rates, by_law: corrections of those rates, and of draft distributions.
    prediction: of the cycle that runs; None: without drafts. corrects: what its outcome updates.
    """

    prediction: Prediction | None = None

    def __init__(
        self,
        cost: CycleCost,
        rates: tuple[float, ...] | None = None,
        corrections: "Corrections | None" = None,
        batch: int = 1,
    ) -> None:
        """rates: None where nobody knows them. corrections: those of the sequence; None: new ones.

        batch: sequences that decode together. All of them wait while one tries whether drafting pays, so
        each tries more rarely.
        """
        if corrections is None:
            corrections = build_corrections(rates)
        self.cost = cost
        self.rates: tuple[float, ...] = GUESSED_RATES
        if rates:
            self.rates = rates
        self.plain = cost.baseline_speed
        self.forward = cost.predict_forward_seconds(
            cost.nodes[-1]
        )  # [M] seconds over 1, 2, … nodes
        self.rate_correction = corrections.by_rates
        self.logit_correction = corrections.by_law
        self.corrects = self.logit_correction
        self.tokens = 0.0  # of cycles whose tree was chosen level by level
        self.seconds = 0.0
        self.idle = 0
        self.trials = 0
        self.trying = False
        self.gap = RETRY_CYCLES * batch

    @property
    def cycle_seconds(self) -> float:
        """Modelled seconds of the cycle that runs."""
        if self.prediction is None:
            return 1 / self.plain
        return self.prediction.seconds

    def start(self, speed: float) -> None:
        """An estimate of the speed of trees chosen level by level, in tokens per second, for some cycles."""
        if not self.seconds:
            self.tokens = PRIOR_CYCLES * speed / self.plain
            self.seconds = PRIOR_CYCLES / self.plain

    @property
    def speed(self) -> float:
        """Tokens per second of the cycles whose tree was chosen level by level."""
        return self.tokens / self.seconds

    def should_skip_cycle(self, speed: float) -> bool:
        """Whether this cycle goes without drafts. speed: expected of drafting, in tokens per second.

        The lower it is, and the more trials have brought nothing, the later drafting is tried again.
        """
        self.prediction = None
        self.trying = False
        if speed > self.plain:
            self.idle = 0
            self.trials = 0
            return False
        far = (self.plain / max(speed, self.plain / 8)) ** RETRY_POWER
        self.trying = self.idle >= self.gap * 2**self.trials * far
        if self.trying:
            self.idle = 0
            self.trials += 1
        else:
            self.idle += 1
        return not self.trying

    def predict(self, prediction: Prediction, corrects: Correction) -> None:
        """What the tree of this cycle brings. corrects: `by_rates` or `by_law`."""
        self.prediction = prediction
        self.corrects = corrects

    def update(self, path: Sequence[int]) -> None:
        """A cycle has ended. path: the accepted nodes, without the root."""
        if not self.prediction:
            return
        self.corrects.update(self.prediction, path)
        if self.corrects is self.logit_correction:
            self.tokens = RATE_DECAY * self.tokens + 1 + len(path)
            self.seconds = RATE_DECAY * self.seconds + self.prediction.seconds
        if path:
            self.trials = 0


@dataclass(frozen=True)
class Corrections:
    """Of one sequence. by_rates: of the rates of a cost model. by_law: of draft distributions."""

    by_rates: Correction
    by_law: Correction


def build_corrections(rates: tuple[float, ...] | None) -> Corrections:
    """The corrections of a sequence at its start. rates: None where nobody knows them."""
    weight = GUESSED_RATE_WEIGHT
    if rates:
        weight = FITTED_RATE_WEIGHT
    return Corrections(Correction(weight), Correction(weight))


@final
class CostModels:
    """The cost models of one sequence, by batch size.

    A forward over several sequences costs less for each, and each further node more: with enough of them
    drafting stops paying. So every batch size has a cost, a speed and pauses of its own. The corrections
    depend on the sequence alone and are shared.

    present: the model of the cycle that runs.
    """

    current: CostModel

    def __init__(self, costs: CostBy, rates: tuple[float, ...] | None = None) -> None:
        self.costs = costs
        self.rates = rates
        self.corrections = build_corrections(rates)
        self._by_cost: dict[CycleCost, CostModel] = {}

    def select_for_batch(self, batch: int) -> CostModel:
        """The model of a cycle of this many sequences. It becomes the present one."""
        cost = self.costs(batch)
        if cost not in self._by_cost:
            self._by_cost[cost] = CostModel(cost, self.rates, self.corrections, batch)
        self.current = self._by_cost[cost]
        return self.current


EXPECTED_ACCEPTED_TOKENS = 1.5  # accepted tokens a cycle of a draft model of which nothing is known
CHOICE_DECAY = 0.9  # weight of the cycles before in `CacheOrModel`, a cycle


@final
class CacheOrModel:
    """Whose drafts a cycle takes: a suffix cache's or the draft model's, whichever predict more.

    It keeps what the draft model brought to one sequence so far: tokens, and modelled seconds. So it
    depends on the sequence's past alone, and no verifier's distribution changes by it.
    """

    def __init__(self) -> None:
        self.cycles = float(PRIOR_CYCLES)
        self.tokens = PRIOR_CYCLES * (1 + EXPECTED_ACCEPTED_TOKENS)
        self.seconds = 0.0

    def should_use_cache(self, score: float, nodes: int, cost: CycleCost | None) -> bool:
        """Whether to take the drafts of a suffix cache.

        score: accepted tokens that they predict. nodes: of their tree. cost: with it tokens per second
        count, else tokens a cycle.
        """
        if cost is None:
            return 1 + score > self.tokens / self.cycles
        # Before the draft model's first cycle it costs what a chain of two does.
        seconds = self.seconds
        if not seconds:
            seconds = PRIOR_CYCLES * cost.predict_cycle(3, 2)
        model_speed = self.tokens / seconds
        return (1 + score) / cost.predict_cycle(nodes, 0) > max(cost.baseline_speed, model_speed)

    def update(self, accepted: int, seconds: float | None) -> None:
        """A cycle of the draft model has ended. seconds: modelled; None: nobody knows."""
        if seconds is not None:
            self.seconds = CHOICE_DECAY * (self.seconds or PRIOR_CYCLES * seconds) + seconds
        self.cycles = CHOICE_DECAY * self.cycles + 1
        self.tokens = CHOICE_DECAY * self.tokens + 1 + accepted
