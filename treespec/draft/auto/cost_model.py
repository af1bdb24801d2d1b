"""The cost model of one sequence: it decides by modelled seconds and corrected acceptance rates.

Seconds are modelled, not clocked. So the choice of each cycle depends only on the sequence's past and on the
batch size.

A drafter predicts for each node Pr(it is accepted | its parent is). `Correction` is the ratio of actual to
predicted acceptances at the nodes that were reached. It is kept separately for first children and for the
others, and for the root's children and for deeper ones: after one right draft the next is right more often.

    root - a .6 - c .5       accepted: a, and the target's own token after it
         \\ b .2              predicted for the root's first child .6, actual 1; for its others .2, actual 0
                             predicted for deeper first children .5, actual 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from treespec.draft.auto.cost import CostBy, CycleCost

# Factor of the weight of earlier cycles, for each cycle: acceptance drifts in a sequence.
RATE_DECAY = 0.98
# Prior weight of fitted and of guessed rates, in predicted acceptances.
FITTED_RATE_WEIGHT = 10.0
GUESSED_RATE_WEIGHT = 2.0
GUESSED_RATES = (0.7, 0.1, 0.05)  # of an unknown drafter's first, second, third child
PRIOR_CYCLES = 4  # weight of the first estimate of tokens and seconds in `CacheOrModel`, in cycles
# Weight of the first estimate of the speed, in cycles: from fitted rates, from guessed ones.
FITTED_SPEED_CYCLES = 16
GUESSED_SPEED_CYCLES = 2
# Bounds of a correction.
MIN_CORRECTION = 0.02
MAX_CORRECTION = 1.5
MAX_CHILD_PROBABILITY = 0.98  # of a node's children together
FIRST_MEAN_NODES = 2.0  # of a sequence's tree in a batch, before its first one
MEAN_NODES_DECAY = 0.9  # of earlier trees in their mean size
SMALLEST_FLOAT = float(np.finfo(float).tiny)  # of a divisor
# Cycles without drafts before drafting is tried again, if it is nearly fast enough.
RETRY_CYCLES = 8
RETRY_POWER = 6  # that number is multiplied by (one-token speed / drafting speed) to this power


def limit_sum(probabilities: list[float]) -> list[float]:
    """Limits the sum to MAX_CHILD_PROBABILITY: the first child keeps its value, the others are scaled.

    probabilities: of the children of a node.

    .9 .2 .1, at most .98    .9 and .08 for the others    .9 .053 .027
    """
    if sum(probabilities) <= MAX_CHILD_PROBABILITY:
        return probabilities
    first = min(probabilities[0], MAX_CHILD_PROBABILITY)
    limit = MAX_CHILD_PROBABILITY - first
    others = probabilities[1:]
    factor = limit / max(sum(others), limit, SMALLEST_FLOAT)
    return [first, *[other * factor for other in others]]


@final
class Correction:
    """The ratio of actual to predicted acceptances.

    Attributes:
        predicted, accepted: [2, 2] decayed counts. Rows: the root's children, deeper ones. Columns: first
            children, the others.
        factors: [2, 2] actual acceptances per predicted one, within bounds.
    """

    def __init__(self, weight: float) -> None:
        """weight: the prior weight of the ratio 1, in predicted acceptances."""
        # Plain numbers: of four, numpy is slower.
        self.predicted = [[weight, weight], [weight, weight]]
        self.accepted = [[weight, weight], [weight, weight]]
        self.factors = [[1.0, 1.0], [1.0, 1.0]]

    def correct_predictions(self, probabilities: Sequence[float], depth: int) -> list[float]:
        """Multiplies predictions by the ratios so far.

        probabilities: of the children of a node, the most likely first. depth: of the node; 0: the root.
        """
        first, others = self.factors[min(depth, 1)]
        corrected = [others * probability for probability in probabilities]
        corrected[0] = first * probabilities[0]
        return limit_sum(corrected)

    def update(self, prediction: "Prediction", path: Sequence[int]) -> None:
        """Learns from a verified tree. path: its accepted nodes, without the root."""
        predicted = scale_counts(self.predicted)
        accepted = scale_counts(self.accepted)
        parents = prediction.parents
        probabilities = prediction.probabilities
        for depth, node in enumerate([0, *path]):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children:
                continue
            row = min(depth, 1)
            predicted[row][0] += probabilities[children[0]]
            others = 0.0
            for child in children[1:]:
                others += probabilities[child]
            predicted[row][1] += others
            if depth < len(path):
                is_other = path[depth] != children[0]
                accepted[row][int(is_other)] += 1
        self.predicted = predicted
        self.accepted = accepted
        self.factors = [
            list(map(compute_factor, *counts)) for counts in zip(accepted, predicted, strict=True)
        ]


def scale_counts(counts: list[list[float]]) -> list[list[float]]:
    """Returns [2, 2] counts with the weight that they have a cycle later."""
    return [[RATE_DECAY * count for count in row] for row in counts]


def compute_factor(accepted: float, predicted: float) -> float:
    """Returns the actual acceptances per predicted one, within bounds."""
    ratio = accepted / max(predicted, SMALLEST_FLOAT)
    return min(max(ratio, MIN_CORRECTION), MAX_CORRECTION)


@dataclass(frozen=True)
class Prediction:
    """The predicted outcome of one cycle's tree.

    Attributes:
        seconds: modelled seconds of the cycle.
        parents: the parent of each node.
        probabilities: of each node, Pr(it is accepted | its parent is).
    """

    seconds: float
    parents: list[int]
    probabilities: list[float]


@final
class CostModel:
    """The cost model of one sequence at one batch size.

    Attributes:
        rates: Pr(the first, second, … child of a node is accepted), measured or guessed.
        prior_cycles: weight of the first estimate of the speed, in cycles.
        rate_correction, logit_correction: corrections of these rates, and of draft distributions.
        prediction: of the present cycle; None: it drafts nothing.
        corrects: the correction that the cycle's outcome updates.
        plain: tokens per second of one-token decoding.
        worthwhile_speed: tokens per second that drafts must seem to exceed.
        mean_nodes: the decayed mean size of the sequence's trees. The model assumes it for the other sequences.
        tokens, seconds: decayed sums over the cycles whose tree was chosen level by level.
        idle: cycles without drafts since the last trial.
        trials: trials that brought no accepted token, one after another.
        trying: whether the present cycle is a trial.
        gap: cycles before the first trial.
    """

    prediction: Prediction | None = None

    def __init__(
        self,
        cost: CycleCost,
        rates: tuple[float, ...] | None = None,
        corrections: "Corrections | None" = None,
        batch: int = 1,
    ) -> None:
        """Creates a model without history.

        Args:
            cost: of a cycle at this batch size.
            rates: None: unknown; guessed rates are taken.
            corrections: the sequence's; None: new ones.
            batch: the number of sequences that decode together. All wait while one tries drafting again, so
                each tries more rarely.
        """
        if corrections is None:
            corrections = build_corrections(rates)
        self.cost = cost
        self.rates: tuple[float, ...] = GUESSED_RATES
        self.prior_cycles = GUESSED_SPEED_CYCLES
        if rates:
            self.rates = rates
            self.prior_cycles = FITTED_SPEED_CYCLES
        self.plain = cost.baseline_speed
        self.mean_nodes = FIRST_MEAN_NODES
        self.worthwhile_speed = cost.least_speed
        self.rate_correction = corrections.by_rates
        self.logit_correction = corrections.by_law
        self.corrects = self.logit_correction
        self.tokens = 0.0
        self.seconds = 0.0
        self.idle = 0
        self.trials = 0
        self.trying = False
        self.gap = RETRY_CYCLES * batch

    @property
    def cycle_seconds(self) -> float:
        """Modelled seconds of the present cycle."""
        if self.prediction is None:
            return 1 / self.plain
        return self.prediction.seconds

    def start(self, speed: float) -> None:
        """Sets the first estimate of the speed of trees chosen level by level. speed: tokens per second."""
        if not self.seconds:
            self.tokens = self.prior_cycles * speed / self.plain
            self.seconds = self.prior_cycles / self.plain

    @property
    def speed(self) -> float:
        """Tokens per second of the cycles whose tree was chosen level by level."""
        return self.tokens / self.seconds

    def should_skip_cycle(self, speed: float) -> bool:
        """Whether this cycle drafts nothing.

        The slower drafting is, and the more trials have failed, the later it is tried again.

        speed: expected tokens per second with drafts.
        """
        self.prediction = None
        self.trying = False
        if speed > self.worthwhile_speed:
            self.idle = 0
            self.trials = 0
            return False
        slowdown = (self.worthwhile_speed / max(speed, self.plain / 8)) ** RETRY_POWER
        self.trying = self.idle >= self.gap * 2**self.trials * slowdown
        if self.trying:
            self.idle = 0
            self.trials += 1
        else:
            self.idle += 1
        return not self.trying

    def predict(self, prediction: Prediction, corrects: Correction) -> None:
        """Sets the prediction of this cycle. corrects: `rate_correction` or `logit_correction`."""
        self.prediction = prediction
        self.corrects = corrects
        weight = 1 - MEAN_NODES_DECAY
        self.mean_nodes += weight * (len(prediction.parents) - self.mean_nodes)

    def update(self, path: Sequence[int]) -> None:
        """Learns from a cycle. path: the accepted nodes, without the root."""
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
    """The corrections of one sequence.

    Attributes:
        by_rates: of a cost model's rates.
        by_law: of draft distributions.
    """

    by_rates: Correction
    by_law: Correction


def build_corrections(rates: tuple[float, ...] | None) -> Corrections:
    """Returns the corrections of a new sequence. rates: measured ones; None: unknown."""
    weight = GUESSED_RATE_WEIGHT
    if rates:
        weight = FITTED_RATE_WEIGHT
    return Corrections(Correction(weight), Correction(weight))


@final
class CostModels:
    """The cost models of one sequence, one for each batch size.

    In a larger batch a forward costs less per sequence, and each further node costs more: with enough sequences
    drafting is slower than not drafting. In a longer text each node costs more. So every batch size and every step of
    the length has a model. The corrections depend only on the
    sequence; the models share them.

    Attributes:
        current: the model of the present cycle.
    """

    current: CostModel

    def __init__(self, costs: CostBy, rates: tuple[float, ...] | None = None) -> None:
        self.costs = costs
        self.rates = rates
        self.corrections = build_corrections(rates)
        self._by_cost: dict[CycleCost, CostModel] = {}

    def select_for_batch(self, batch: int, length: float = 0.0) -> CostModel:
        """Returns the model for a batch size and makes it the current one.

        length: the mean number of tokens of the texts, if the cost is to follow it.
        """
        cost = self.costs(batch).select_length(length)
        if cost not in self._by_cost:
            self._by_cost[cost] = CostModel(cost, self.rates, self.corrections, batch)
        self.current = self._by_cost[cost]
        return self.current


EXPECTED_ACCEPTED_TOKENS = 1.5  # accepted tokens per cycle of an unknown draft model
CHOICE_DECAY = 0.9  # factor of the weight of earlier cycles in `CacheOrModel`, for each cycle


def can_pay_in_cache(cost: CycleCost | None) -> bool:
    """Whether any drafts of a suffix cache can be faster than one-token decoding: those that are all accepted.

    cost: of a cycle; None: it is not compared.
    """
    if cost is None:
        return True
    return cost.fastest_accepted_speed > cost.least_speed


@final
class CacheOrModel:
    """Chooses between the drafts of a suffix cache and of the draft model for one sequence.

    It keeps the tokens and modelled seconds of the draft model's past cycles. The choice depends only on the
    sequence's past, so no verifier's distribution changes by it.
    """

    def __init__(self) -> None:
        self.cycles = float(PRIOR_CYCLES)
        self.tokens = PRIOR_CYCLES * (1 + EXPECTED_ACCEPTED_TOKENS)
        self.seconds = 0.0

    def should_use_cache(self, score: float, nodes: int, cost: CycleCost | None) -> bool:
        """Whether to take the drafts of a suffix cache.

        score: the expected number of their accepted tokens. nodes: of their tree. cost: compare tokens per second;
        None: compare tokens per cycle.
        """
        if cost is None:
            return 1 + score > self.tokens / self.cycles
        # Before its first cycle, the draft model is assumed to draft a chain of two.
        seconds = self.seconds
        if not seconds:
            seconds = PRIOR_CYCLES * cost.predict_cycle(3, 2)
        model_speed = self.tokens / seconds
        cache_seconds = float(cost.compute_forward_price(nodes)) + cost.overhead
        return (1 + score) / cache_seconds > max(cost.least_speed, model_speed)

    def update(self, accepted: int, seconds: float | None) -> None:
        """Learns from a cycle of the draft model. accepted: tokens. seconds: modelled; None: unknown."""
        if seconds is not None:
            self.seconds = CHOICE_DECAY * (self.seconds or PRIOR_CYCLES * seconds) + seconds
        self.cycles = CHOICE_DECAY * self.cycles + 1
        self.tokens = CHOICE_DECAY * self.tokens + 1 + accepted
