"""A test of any verifier by its outputs: does it keep the target's distribution?

Target and draft are tables over two or three tokens: a distribution after each text of at most D
tokens. A cycle drafts a tree from the draft's table and calls the verifier. If the verifier returns fewer than
D + 1 tokens, the remaining tokens are drawn from the target's table. The D + 1 tokens must then have the target's
distribution, and the table gives the probability of each text exactly.

A verifier by its name, or of your own, in a minute, from the folder of mine.py:

    python -m treespec.verify.conformance mine:Mine
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from treespec.errors import is_input_error
from treespec.verify.conformance_schemes import SchemeConformance, check_scheme
from treespec.verify.conformance_trees import (
    ConformanceTrial,
    Drawn,
    Judge,
    Table,
    Text,
    draft_trial_tree,
    sample_index,
)
from treespec.verify.conformance_verifiers import build_draw_tokens, build_verifier_judge
from treespec.verify.registry import load_verifier
from treespec.verify.walk import Verifier, is_walk

TABLE_SHARPNESS = (
    (1.0, 1.0),
    (0.3, 1.0),
    (1.0, 0.3),
)  # Dirichlet's of random p and q; below 1 nearly one-hot
NUM_TABLES = 2 + len(TABLE_SHARPNESS) + 3
VERIFIER_RUNS = 500  # cycles on each pair of tables in `check_verifier`
DETECTION_POWER = 0.99
MIN_EXPECTED_RUNS = 5  # expected count of a text in a χ² test; rarer texts are counted together
# Faults that published verifiers have had.
SURE_ACCEPTANCE = "likelier drafts accepted for sure"
ANSWER_BY_P = "a refused draft answered by p"
UNSCALED_RESIDUAL = "the residual not normalised"
SHARED_UNIFORM = "one uniform number for all drafts"
SQUARED_LAST = "the last token by p squared"
PLANTED_FAULTS = (SURE_ACCEPTANCE, ANSWER_BY_P, UNSCALED_RESIDUAL, SHARED_UNIFORM, SQUARED_LAST)


@dataclass(frozen=True)
class Counterexample:
    """Tables on which the texts have a wrong distribution.

    Attributes:
        p, q: the tables of target and draft, {text: distribution [V]}.
        should: {text: its probability under the target}.
        are: {text: its share of the cycles}.
        p_value: of the χ² test.
    """

    p: Table
    q: Table
    should: Mapping[Text, float]
    are: Mapping[Text, float]
    p_value: float

    @property
    def shifted(self) -> float:
        """The total variation between the distribution of the texts and the target's."""
        return sum(abs(self.should[text] - self.are[text]) for text in self.should) / 2

    def __str__(self) -> str:
        rows = [f"{self.shifted:.1%} of the probability is shifted (p-value {self.p_value:.1e})"]
        for text, q in self.q.items():
            rows.append(f"after {text}: p = {self.p[text].round(3)}, q = {q.round(3)}")
        for text, share in self.should.items():
            rows.append(f"text {text}: {self.are[text]:.3f}, should be {share:.3f}")
        return "\n".join(rows)


@dataclass(frozen=True)
class Conformance:
    """The result of `check`.

    Attributes:
        counterexample: the smallest tables on which the verifier failed; None: it passed on all tables.
        tables: pairs of tables.
        runs: cycles on each pair of tables.
        error: probability that an exact verifier fails one pair of tables.
        finds: total variation that the cycles detect with probability `DETECTION_POWER`.
        missed: planted faults that the same number of cycles did not detect.
    """

    counterexample: Counterexample | None
    tables: int
    runs: int
    error: float
    finds: float
    missed: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.counterexample is None

    def __str__(self) -> str:
        if self.counterexample:
            return f"not the target's distribution: {self.counterexample}"
        detected = len(PLANTED_FAULTS) - len(self.missed)
        passed = (
            f"the target's distribution on {self.tables} pairs of tables, {self.runs:,} cycles on "
            f"each, at error {self.error:g}; a shift of {self.finds:.1%} would be found with "
            f"probability {DETECTION_POWER}. The same cycles find {detected} of {len(PLANTED_FAULTS)} planted faults"
        )
        for name in self.missed:
            passed += f"; not: {name}"
        return passed


def check(
    verifier: Judge,
    widths: Sequence[int] = (1, 1),
    draws: Drawn = "independent",
    array: Callable[[np.ndarray], Any] = torch.from_numpy,
    runs: int = 4000,
    error: float = 0.001,
) -> Conformance:
    """Test whether a verifier's texts have the target's distribution. An exact verifier fails with probability `error`.

    A draft of five nodes for `widths` (2, 1), whose root carries no token:

        0 ─┬─ 1 ─── 3        tokens     -1  1  0  1  1
           └─ 2 ─── 4        parents    -1  0  0  1  2

    Args:
        verifier: called with p and q [N, V] float64 probabilities, the target's and the draft's after each
            node, and tokens and parents [N] int64. Children of node i were drawn from q[i]; no child
            was drawn from the q of a leaf. Returns the accepted tokens and one more. It draws its random numbers
            from a generator of its own.
        widths: children of each node, by level.
        draws: how siblings are drawn. Choose what the verifier is made for.
        array: converts numpy's arrays to what the verifier takes, such as `numpy.asarray`.
        runs: cycles on each pair of tables. More cycles detect a smaller shift of probability.
        error: probability that an exact verifier fails.

    Returns: the counterexample if there is one, and the shift of probability that the cycles detect.

    Raises:
        ValueError: the verifier returned tokens that no path could give.
    """

    # 1. The verifier, on tables of growing size. The tests share the error.
    def judge(
        p: np.ndarray, q: np.ndarray, tokens: np.ndarray, parents: np.ndarray
    ) -> Sequence[int]:
        return verifier(array(p), array(q), array(tokens), array(parents))

    trial = ConformanceTrial(widths, draws, runs, error, np.random.default_rng(0))
    tests = len(trial.sizes) * NUM_TABLES
    trial = replace(trial, error=error / tests)
    counterexample = find_counterexample(judge, trial)

    # 2. Planted faults, which show what this number of cycles detects.
    trial = replace(trial, draws="independent")
    missed = []
    if not counterexample:
        for fault in PLANTED_FAULTS:
            if not find_counterexample(build_recursive_rejection(trial.generator, fault), trial):
                missed.append(fault)
    finds = find_detectable_shift(runs, trial.error, trial.sizes[-1])
    return Conformance(counterexample, tests, runs, error, finds, missed)


def find_counterexample(judge: Judge, trial: ConformanceTrial) -> Counterexample | None:
    """Return the first pair of tables on which the cycles' texts have a wrong distribution; None: all pairs pass."""
    for vocab, depth in trial.sizes:
        for p, q in build_table_pairs(vocab, depth, trial.generator):
            should = list_text_probabilities(p, vocab, depth + 1)
            counts = dict.fromkeys(should, 0)
            for _ in range(trial.runs):
                counts[run_cycle(judge, p, q, depth, trial)] += 1
            p_value = compute_chi2_p_value(counts, should, trial.runs)
            if p_value < trial.error:
                are = {text: count / trial.runs for text, count in counts.items()}
                return Counterexample(p, q, should, are, p_value)
    return None


def list_text_probabilities(p: Table, vocab: int, length: int) -> dict[Text, float]:
    """Return {text: probability} for all texts of `length` tokens: the product over its tokens, each given its prefix.

    With p = (.6, .4) after every text, the texts of two tokens have:

        0 0  .36      0 1  .24      1 0  .24      1 1  .16
    """
    probabilities = {}
    for text in product(range(vocab), repeat=length):
        probabilities[text] = prod(float(p[text[:i]][token]) for i, token in enumerate(text))
    return probabilities


def build_table_pairs(
    vocab: int, depth: int, generator: np.random.Generator
) -> Iterator[tuple[Table, Table]]:
    """Yield pairs (p, q): simple ones, random ones, an equal pair, a sharper q, a p without q's most likely token."""
    texts: list[Text] = []
    for length in range(depth + 1):
        texts += product(range(vocab), repeat=length)
    even = dict.fromkeys(texts, np.full(vocab, 1 / vocab))
    uneven = dict.fromkeys(texts, np.array([2, *[1] * (vocab - 1)]) / (vocab + 1))
    yield even, uneven
    yield uneven, even
    for sharpness_p, sharpness_q in TABLE_SHARPNESS:
        p = {text: generator.dirichlet([sharpness_p] * vocab) for text in texts}
        q = {text: generator.dirichlet([sharpness_q] * vocab) for text in texts}
        yield p, q
    yield q, q
    yield p, {text: row**2 / (row**2).sum() for text, row in p.items()}
    for text, row in q.items():
        p[text] = np.where(np.arange(vocab) == row.argmax(), 0, p[text] + 1e-3)
        p[text] /= p[text].sum()
    yield p, q


def run_cycle(judge: Judge, p: Table, q: Table, depth: int, trial: ConformanceTrial) -> Text:
    """Run one cycle and return its `depth` + 1 tokens.

    Args:
        judge: the verifier.
        p, q: tables of target and draft.
        depth: the largest number of levels of the tree.
        trial: how the tree is drafted.

    Raises:
        ValueError: as `check`.
    """
    # 1. Draft a tree, and judge it.
    tree = draft_trial_tree(q, depth, trial)
    target = np.array([p[text] for text in tree.texts])
    draft = np.array([q[text] for text in tree.texts])
    answer = judge(target, draft, np.array(tree.tokens), np.array(tree.parents))

    # 2. Check the answer: 1 to depth + 1 tokens of the vocabulary.
    output = tuple(int(token) for token in answer)
    vocab = target.shape[1]
    is_text = all(0 <= token < vocab for token in output)
    if not 0 < len(output) <= depth + 1 or not is_text:
        raise ValueError(
            f"the verifier gives {output}: 1 to {depth + 1} tokens below {vocab} were due"
        )

    # 3. Draw the remaining tokens from p.
    while len(output) <= depth:
        output += (sample_index(p[output], trial.generator),)
    return output


def compute_chi2_p_value(
    counts: Mapping[Text, int], should: Mapping[Text, float], runs: int
) -> float:
    """Return the p-value of a χ² test with rare texts counted together; 0 if a text of probability 0 was counted."""
    if any(counts[text] for text, share in should.items() if not share):
        return 0.0
    pairs: list[tuple[int, float]] = []  # counts, and expected counts
    rare_count = 0
    rare_due = 0.0
    for text, share in should.items():
        if runs * share >= MIN_EXPECTED_RUNS:
            pairs.append((counts[text], runs * share))
        else:
            rare_count += counts[text]
            rare_due += runs * share
    if rare_due >= MIN_EXPECTED_RUNS:
        pairs.append((rare_count, rare_due))
    statistic = sum((count - due) ** 2 / due for count, due in pairs)
    degrees = len(pairs) - 1
    if 0 < rare_due < MIN_EXPECTED_RUNS:
        degrees += 1  # without the rare texts, the counts need not sum to the runs
    return float(chi2.sf(statistic, max(1, degrees)))


def find_detectable_shift(runs: int, error: float, size: tuple[int, int]) -> float:
    """Return the total variation that is detected with probability `DETECTION_POWER`.

    It bounds the χ² statistic from below: Σ δ²/p is at least (Σ |δ|)².

    Args:
        runs: cycles on each pair of tables.
        error: of one χ² test.
        size: (tokens, levels) of the tables.
    """
    vocab, depth = size
    degrees = vocab ** (depth + 1) - 1
    critical = chi2.isf(error, degrees)
    needed = brentq(
        lambda x: ncx2.sf(critical, degrees, x) - DETECTION_POWER, 1e-9, 9 * critical + 100
    )
    return min(1.0, sqrt(needed / runs) / 2)


def build_recursive_rejection(generator: np.random.Generator, fault: str = "") -> Judge:
    """Return a verifier of independent draws by recursive rejection sampling (SpecInfer, 2305.09781, algorithm 2).

    fault: one of `PLANTED_FAULTS`, to be planted; "" for the exact verifier.
    """

    def is_accepted(residual_probs: np.ndarray, q: np.ndarray, token: int, uniform: float) -> bool:
        if fault == SURE_ACCEPTANCE and residual_probs[token] == residual_probs.max():
            return True
        return bool(uniform * q[token] < residual_probs[token])

    def subtract_draft(residual_probs: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        if fault == ANSWER_BY_P:
            return p
        residual = np.maximum(residual_probs - q, 0)
        mass = residual.sum()
        if fault == UNSCALED_RESIDUAL or not mass:
            return residual
        return residual / mass

    def weigh_last(residual_probs: np.ndarray) -> np.ndarray:
        if fault == SQUARED_LAST:
            return residual_probs**2
        if fault == UNSCALED_RESIDUAL:  # the mass that is missing goes to the last token
            return np.append(
                residual_probs[:-1], max(residual_probs[-1], 1 - residual_probs[:-1].sum())
            )
        return residual_probs

    def judge(p: np.ndarray, q: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> list[int]:
        # Down the tree, and at each node one child after the other.
        node = 0
        output: list[int] = []
        uniform = generator.random()
        while True:
            residual_probs = p[node]
            accepted = None
            for child in np.flatnonzero(parents == node):
                if fault != SHARED_UNIFORM:
                    uniform = generator.random()
                if is_accepted(residual_probs, q[node], tokens[child], uniform):
                    accepted = int(child)
                    break
                residual_probs = subtract_draft(residual_probs, p[node], q[node])
            if accepted is None:
                break
            output.append(int(tokens[accepted]))
            node = accepted
        output.append(sample_index(weigh_last(residual_probs), generator))
        return output

    return judge


def check_verifier(verifier: Verifier) -> SchemeConformance | Conformance:
    """Test a verifier: a walk by the one rule of its scheme, any other by its texts on trees of its scheme's draws."""
    if is_walk(verifier):
        return check_scheme(verifier.scheme)
    width = min(2, verifier.scheme.max_draws or 2)
    draws = build_draw_tokens(verifier)
    return check(build_verifier_judge(verifier), (width, 1), draws, runs=VERIFIER_RUNS)


def run_checks(arguments: Sequence[str]) -> int:
    """Test the verifiers that are named, and print a verdict on each. Returns 0 if all passed, 1 if not, else 2."""
    if not arguments:
        print("treespec: name verifiers, such as rrs or mine:Mine of mine.py here", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # for tensors as small as these, threads cost more than they save
    code = 0
    for name in arguments:
        try:
            result = check_verifier(load_verifier(name, allow_lossy=True))
        except ValueError as error:
            if not is_input_error(error):
                raise
            print(f"treespec: {error}", file=sys.stderr)
            return 2
        print(f"{name}: {result}")
        if not result.passed:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(run_checks(sys.argv[1:]))
