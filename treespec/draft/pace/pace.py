"""What drafting brings to one text and costs: measured times, promised acceptance, and what was accepted so far.

Modelled seconds, not a clock: the choice of each cycle depends on the text's own past and on the
number of texts that run, never on its own draws to come, so it stays lossless. With a seed of the
caller's it depends on the past alone (`Law.company`), so the same seed gives the same text.

A drafter promises of each node Pr(it is accepted | its parent is). `trust` is how many of these promises were kept at
the nodes that were reached, of first children and of the others apart, and of the root's children and of deeper ones:
where one draft was right the next is right more often.

    root - a .6 - c .5       accepted: a, and the target's own token after it
         \ b .2              promised to the root's first child .6, kept 1; to its others .2, kept 0
                             promised to deeper first children .5, kept 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from treespec.draft.pace.times import Times, TimesBy

FORGET = 0.98  # weight of the cycles before, a cycle: texts change their manner
FITTED, GUESSED = 10.0, 2.0  # acceptances that rates fitted on text, and rates guessed, count for
GUESS = (0.7, 0.1, 0.05)  # rates of a drafter that nothing is known of
CYCLES = 4  # cycles that the first estimate of the speed counts for
LEAST, MOST = 0.02, 1.5  # bounds of trust
CERTAIN = 0.98  # the most that is believed of a child
GAP = 8  # cycles without drafts before one is tried again, where drafting nearly pays
STEEP = 6  # that number grows with how far off drafting is, to this power


def bounded(chances: np.ndarray) -> np.ndarray:
    """[F, K] chances of children with a sum of at most CERTAIN: the first keeps its own, the others share the rest.

    .9 .2 .1, at most .98    .9 and .08 for the others    .9 .053 .027
    """
    first = chances[:, :1].clip(max=CERTAIN)
    others = chances[:, 1:]
    room = (CERTAIN - first) / np.maximum(others.sum(1, keepdims=True), CERTAIN - first).clip(
        np.finfo(float).tiny
    )
    return np.concatenate([first, others * room], axis=1)


@final
class Trust:
    """How many promises were kept.

    promised, kept: [2, 2] of the root's children, and of deeper ones; of first children, and of others.
    """

    def __init__(self, weight: float) -> None:
        """weight: acceptances that the promises themselves count for."""
        self.promised, self.kept = np.full((2, 2), weight), np.full((2, 2), weight)

    @property
    def factors(self) -> np.ndarray:
        """[2, 2] acceptances for one that was promised."""
        return (self.kept / self.promised).clip(LEAST, MOST)

    def believed(self, chances: np.ndarray, depth: int) -> np.ndarray:
        """[F, K] as promised to the children of F nodes, the likeliest first -> as far as it can be believed.

        depth: of the nodes; 0 for the root.
        """
        first, others = self.factors[min(depth, 1)]
        return bounded(chances * np.array([first, *[others] * (chances.shape[1] - 1)]))

    def settle(self, promise: "Promise", path: Sequence[int]) -> None:
        """A tree was verified. path: its accepted nodes, without the root."""
        self.promised, self.kept = FORGET * self.promised, FORGET * self.kept
        for place, node in enumerate([0, *path]):
            (children,) = np.nonzero(promise.parents == node)
            if not len(children):
                continue
            depth = min(place, 1)
            of_first, of_others = promise.chances[children[0]], promise.chances[children[1:]].sum()
            self.promised[depth] += of_first, of_others
            if place < len(path):
                self.kept[depth, int(path[place] != children[0])] += 1


@dataclass(frozen=True)
class Promise:
    """Of one cycle's tree. trust: what it bears on. seconds: of the cycle, modelled.

    parents: [N] of each node. chances: [N] Pr(it is accepted | its parent is).
    """

    trust: Trust
    seconds: float
    parents: np.ndarray
    chances: np.ndarray


@final
class Pace:
    """Of one text. rates: how often the first, second, … child of a node is accepted; None where nobody knows."""

    def __init__(
        self,
        times: Times,
        rates: tuple[float, ...] | None = None,
        trusts: tuple[Trust, Trust] | None = None,
        texts: int = 1,
    ) -> None:
        """trusts: in rates and in draft laws, where they were learned already.

        texts: that decode together. All of them wait while one tries whether drafting pays, so each
        tries more rarely.
        """
        self.times, self.rates = times, rates or GUESS
        self.forward = times.forward(times.nodes[-1])  # [M] seconds over 1, 2, … nodes
        weight = FITTED if rates else GUESSED
        self.by_rates, self.by_law = trusts or (Trust(weight), Trust(weight))
        self.tokens = self.seconds = 0.0  # of cycles whose tree was chosen level by level
        self.idle, self.trials, self.trying = 0, 0, False
        self.gap = GAP * texts
        self.hope = 0.0  # tokens a second that drafting was expected to reach when it began to rest
        self.promise: Promise | None = None  # of the cycle that runs; None: without drafts
        self.grains: np.ndarray | None = None  # trust in rates that the last shape was made for

    @property
    def plain(self) -> float:
        """Tokens a second without drafts."""
        return 1 / (float(self.forward[0]) + self.times.rest[0])

    def start(self, speed: float) -> None:
        """An estimate of the speed of trees chosen level by level, in tokens a second, for some cycles."""
        if not self.seconds:
            self.tokens, self.seconds = CYCLES * speed / self.plain, CYCLES / self.plain

    @property
    def speed(self) -> float:
        """Tokens a second of the cycles whose tree was chosen level by level."""
        return self.tokens / self.seconds

    @property
    def rate(self) -> float:
        """Tokens that a second is worth: what would be had without drafts, or with them."""
        return max(self.plain, self.speed)

    def cost(self, nodes: int, levels: int, draws: int | None = None, inner: int = 0) -> float:
        """Seconds of a cycle with drafts. draws: as `Times.levels` has it. inner: nodes that have children."""
        forward = float(self.forward[min(nodes, len(self.forward)) - 1])
        return (
            forward + self.times.drafting(levels, draws, inner) + self.times.resting(draws, nodes)
        )

    def rests(self, speed: float) -> bool:
        """Whether this cycle goes without drafts. speed: what drafting is expected to reach, in tokens a second.

        The less it would reach, and the more trials have brought nothing, the later it is tried again.
        """
        self.promise, self.trying, self.hope = None, False, speed
        if speed > self.plain:
            self.idle = self.trials = 0
            return False
        if (
            self.idle
            >= self.gap * 2**self.trials * (self.plain / max(speed, self.plain / 8)) ** STEEP
        ):
            self.idle, self.trials, self.trying = 0, self.trials + 1, True
            return False
        self.idle += 1
        return True

    def settle(self, path: Sequence[int]) -> None:
        """A cycle has ended. path: the accepted nodes, without the root."""
        if not self.promise:
            return
        self.promise.trust.settle(self.promise, path)
        if self.promise.trust is self.by_law:
            self.tokens = FORGET * self.tokens + 1 + len(path)
            self.seconds = FORGET * self.seconds + self.promise.seconds
        if path:
            self.trials = 0


@final
class Paces:
    """The paces of one text, by the number of texts that its cycles decode together.

    A forward over several texts costs less per text, and each further node more: with enough texts
    drafting stops paying. So every number has times, a speed and rests of its own. How far promises
    are kept depends on the text alone: that they share.

    present: the pace of the cycle that runs.
    """

    def __init__(self, times: TimesBy, rates: tuple[float, ...] | None = None) -> None:
        self.times, self.rates = times, rates
        self.present = Pace(times(1), rates)
        self._by_times = {self.present.times: self.present}

    def among(self, texts: int) -> Pace:
        """The pace of a cycle of this many texts. It becomes the present one."""
        times = self.times(texts)
        if times not in self._by_times:
            trusts = self.present.by_rates, self.present.by_law
            self._by_times[times] = Pace(times, self.rates, trusts, texts)
        self.present = self._by_times[times]
        return self.present
