"""Slow references: every text or every set of draws with its exact probability, in plain Python."""

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import torch
from drafters import NEW, PROMPT, WAYS
from models import rand, seeded, zeros

from treespec.engine import cycle as steps
from treespec.sampling import probs as sampling
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.tree import Draws
from treespec.verify import registry, rrs
from treespec.verify.distributions import mask_out

SCHEMES = registry.SCHEMES
LOSSLESS = [name for name, scheme in SCHEMES.items() if scheme.lossless]
ENUMERABLE = [name for name in LOSSLESS if name != "optimal"]  # its draws carry scores: see test_optimal.py
STOCHASTIC = [name for name, scheme in registry.SCHEMES.items() if not scheme.deterministic]
CASE_TABLE = """
plain               | 0.1 0.2 0.3 0.4              | 0.35 0.3 0.25 0.1
p = q               | 0.1 0.2 0.3 0.4              | 0.1 0.2 0.3 0.4
disjoint            | 0.5 0.5 0 0                  | 0 0 0.7 0.3
zeros in p          | 0 0.4 0 0.6                  | 0.3 0.2 0.4 0.1
zeros in q          | 0.3 0.2 0.4 0.1              | 0 0.4 0 0.6
zeros in both       | 0.6 0 0.1 0.3                | 0.2 0.3 0 0.5
one-hot p           | 0 0 1 0                      | 0.4 0.3 0.2 0.1
one-hot q           | 0.4 0.3 0.2 0.1              | 0 1 0 0
one-hot both        | 0 1 0 0                      | 0 0 1 0
one-hot, the same   | 0 0 1 0                      | 0 0 1 0
tiny q              | 0.4 0.3 0.2 0.1              | 0.999999999997 1e-12 2e-12 0
tiny p              | 0.999999999997 1e-12 2e-12 0 | 0.1 0.4 0.2 0.3
tiny both           | 1e-12 0.999999999998 1e-12 0 | 0.999999999998 1e-12 0 1e-12
ties in p/q         | 0.2 0.1 0.4 0.3              | 0.1 0.05 0.55 0.3
ties in q           | 0.5 0.1 0.1 0.3              | 0.25 0.25 0.25 0.25
two ties at the top | 0.1 0.1 0.5 0.3              | 0.1 0.4 0.1 0.4
two supported       | 0.1 0.6 0.2 0.1              | 0.8 0 0 0.2
"""
CASES = {}  # name: p and q of four tokens


for line in CASE_TABLE.strip().splitlines():
    name, *distributions = line.split("|")
    CASES[name.strip()] = tuple([float(mass) for mass in masses.split()] for masses in distributions)


def to_probs(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_probs(vocabulary, generator) -> torch.Tensor:
    """Masses over several orders of magnitude, a fifth of them zero."""
    logits = 2 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    logits[1:][rand(vocabulary - 1, generator=generator) < 0.2] = -torch.inf
    return logits.softmax(-1)


def random_pairs(number, size=5, seed=1):
    generator = seeded(seed)
    return [(random_probs(size, generator), random_probs(size, generator)) for _ in range(number)]


def every_pair(number, size=5):
    """p and q of every case, and random ones."""
    return [tuple(map(to_probs, case)) for case in CASES.values()] + random_pairs(number, size)


def draw_sequentially(q, k):
    """One draw after another, each from q without the earlier ones."""
    total = sum(q)
    if k == 0 or total == 0:
        yield (-1,) * k, 1.0
        return
    for x, mass in enumerate(q):
        rest = [0.0 if y == x else other for y, other in enumerate(q)]
        for draws, probability in draw_sequentially(rest, k - 1):
            yield (x, *draws), mass / total * probability


def draw_independently(distributions):
    for draws in itertools.product(*(range(len(distribution)) for distribution in distributions)):
        probability = 1.0
        for x, distribution in zip(draws, distributions, strict=True):
            probability *= distribution[x]
        yield draws, probability


def draw_tops_then_one(q, k):
    order = sorted(range(len(q)), key=lambda x: -q[x])
    tops = tuple(x for x in order[: k - 1] if q[x] > 0)
    rest = [0.0 if x in tops else mass for x, mass in enumerate(q)]
    for (x,), probability in draw_sequentially(rest, 1):
        draws = (*tops, x)
        yield draws + (-1,) * (k - len(draws)), probability


def draw_hub(q, k):
    if k == 1:
        yield from draw_independently([q])
        return
    a = q.index(max(q))
    for i, mass in enumerate(q):
        if i != a:
            yield (i, a), mass
    for (j,), probability in draw_sequentially([0.0 if x == a else mass for x, mass in enumerate(q)], 1):
        yield (a, j), q[a] * probability


scheme_by_name = registry.load_scheme


def list_draws(name, q, k):
    """The distribution of k draws that have positive probability. q: [V]."""
    distributions = q.tolist()
    match name:
        case "single" | "rrs" | "is-lp" | "kseq":
            found = draw_independently([distributions] * k)
        case "rrs-wo":
            found = draw_sequentially(distributions, k)
        case "greedy":
            found = draw_tops_then_one(distributions, k)
        case "spechub":
            found = draw_hub(distributions, k)
        case "topk" | "typical":
            found = iter([(tuple(sorted(range(len(distributions)), key=lambda x: -distributions[x])[:k]), 1.0)])
    return [(draws, probability) for draws, probability in found if probability > 0]


def enumerate_plans(scheme, p, q, ks):
    """The distribution of the output [V] and Pr(it is one of the draws), for each k; all in one batch.

    p, q: [V]. Every plan is checked to be a distribution.
    """
    width = max(ks)
    distributions = [list_draws(scheme.name, q, k) for k in ks]
    tokens = [draws + (-1,) * (width - len(draws)) for found in distributions for draws, _ in found]
    draws = torch.tensor(tokens)
    rows = len(tokens)
    sizes = [len(found) for found in distributions]
    plan = scheme.plan(p.expand(rows, -1), q.expand(rows, -1), Draws(draws))
    assert plan.dtype == p.dtype
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 1e-12
    drawn = zeros(rows, len(p) + 1).scatter_(1, draws.where(draws >= 0, len(p)), 1.0)[:, :-1]
    results = []
    for found, part, hit in zip(distributions, plan.split(sizes), drawn.split(sizes), strict=True):
        weights = torch.tensor([probability for _, probability in found], dtype=p.dtype)
        results.append((weights @ part, weights @ (part * hit).sum(-1)))
    return results


Text = tuple[int, ...]
State = tuple[Text, tuple[Text, ...]]  # the text and its cycles
START: State = ((), ())
NEVER = 1e-10  # outcomes below it are rounding
BATCH = 64  # sequences replayed together


class Oracle(torch.Generator):
    """The draws of one sequence: those of its script, then the first possible ones."""

    def __new__(cls, _):
        return super().__new__(cls)

    def __init__(self, script):
        self.script = script
        self.taken = []
        self.forks = []
        self.probability = self.before = 1.0  # of all outcomes so far, and of those before this cycle
        self.cycles: tuple[Text, ...] = ()  # nodes and path of each
        self.state = START

    def choose(self, masses):
        """The number of an outcome; that of no outcome, len(masses), where none has mass."""
        total = math.fsum(masses)
        if not total > 0:
            return len(masses)
        at = len(self.taken)
        if at < len(self.script):
            outcome = self.script[at]
        else:
            outcome, *others = (i for i, mass in enumerate(masses) if mass > NEVER * total)
            self.forks += [(*self.taken, other) for other in others]
        assert masses[outcome] > 0, "the same draws led elsewhere"
        self.taken.append(outcome)
        self.probability *= masses[outcome] / total
        return outcome


def sample(distribution, generator):
    rows = distribution.double().reshape(-1, distribution.shape[-1]).tolist()
    return torch.tensor([generator.choose(row) for row in rows], dtype=torch.int64).view(distribution.shape[:-1])


def sample_each(distribution, number, generator):
    return sample(distribution[:, None].expand(-1, number, -1), generator)


def sample_events(probability, generator):
    return sample(torch.stack([1 - probability, probability], dim=-1).clamp(0, 1), generator) > 0


def verify_trees(verifier, trees, logits, samplers, generators):
    verdicts = VERIFY(verifier, trees, logits, samplers, generators)
    for tree, verdict, oracle in zip(trees, verdicts, generators, strict=True):
        if isinstance(verdict, Exception):
            raise verdict
        oracle.cycles += ((len(tree.tokens), *verdict.path),)
    return verdicts


VERIFY = steps.verify_trees


def in_turn(q, width, generator):
    """Distinct draws for `rrs-wo`, which itself makes independent ones and drops repeats."""
    tokens = torch.empty(len(q), 0, dtype=torch.int64)
    for _ in range(width):
        token = sample(mask_out(q, tokens), generator)[:, None]
        tokens = torch.cat([tokens, token.masked_fill(token >= q.shape[-1], -1)], dim=1)
    return tokens


@contextmanager
def oracle_draws() -> Iterator[None]:
    """Inside, all draws of the package are the oracle's."""
    modules = [module for name, module in sys.modules.items() if name.startswith("treespec.")]
    with ExitStack() as stack:
        oracles = {sampling.sample: sample, sampling.sample_each: sample_each, sampling.sample_events: sample_events}
        for original, oracle in oracles.items():
            for module in modules:
                if vars(module).get(original.__name__) is original:
                    stack.enter_context(mock.patch.object(module, original.__name__, oracle))
        stack.enter_context(mock.patch.object(rrs, "OVERSAMPLE_FACTOR", 1))
        stack.enter_context(mock.patch.object(rrs, "draw_iid_children", in_turn))
        stack.enter_context(mock.patch.object(steps, "verify_trees", verify_trees))
        yield


@dataclass(frozen=True)
class End:
    text: Text


@dataclass
class Outcomes:
    """All cycles that can happen: from each state [(probability, the state or the end that it leads to)]."""

    states: dict[State, list[tuple[float, State | End]]] = field(default_factory=lambda: {START: []})
    replays: int = 0

    def distribution(self):
        """{text: probability}, and the mean number of cycles."""
        texts = Counter()
        mean = 0.0
        weights = defaultdict(float, {START: 1.0})
        for state in sorted(self.states, key=lambda state: len(state[0])):
            for probability, after in self.states[state]:
                mass = weights[state] * probability
                mean += mass
                if isinstance(after, End):
                    texts[after.text] += mass
                else:
                    weights[after] += mass
        return texts, mean

    def note(self, text):
        """What the latest cycle of a sequence led to. Returns the scripts of its other outcomes."""
        oracle = text.generator
        first = len(text.prompt)
        tokens = tuple([*text.committed, text.root][first : first + text.stats.new_tokens])
        after = tokens, oracle.cycles
        forks = oracle.forks
        share = oracle.probability / oracle.before
        state = oracle.state
        oracle.state = after
        oracle.before = oracle.probability
        oracle.forks = []
        if len(oracle.taken) >= len(oracle.script):
            self.states[state].append((share, End(tokens) if text.ended else after))
            if not text.ended:
                text.cancelled = after in self.states
                self.states.setdefault(after, [])
        return forks


def enumerate_decoding(
    spec,
    prompt,
    batch=BATCH,
    recall=False,
    reuse=True,
    **options,
) -> Outcomes:
    """Replay all that can happen to a completion.

    recall: whether it is drafted from the suffix cache.
    reuse: whether a sequence takes over the cache of one that has ended.
    """
    found = Outcomes()
    scripts = [()]
    running = []
    decoder = spec.decoder
    with oracle_draws(), torch.inference_mode():
        while scripts or running:
            # 1. Sequences whose scripts end in an outcome that none has had.
            entering = []
            while scripts and len(entering) + len(running) < batch:
                text = spec.request(prompt, seed=0, remember=False, **options)
                text.generator = Oracle(scripts.pop())
                text.sampler.seeded = not recall
                entering.append(text)
                found.replays += 1

            # 2. A cycle of all.
            if not reuse:
                decoder.batch.prefix_cache.clear()
            decoder.run_step(entering)
            running += entering
            for text in running:
                if text.error:
                    raise text.error
                scripts += found.note(text)
            running = [text for text in running if not text.ended]
    return found


def enumerate_runs(run):
    """{what `run` gives with a generator: probability}, over all draws."""
    found = Counter()
    scripts = [()]
    with oracle_draws():
        while scripts:
            oracle = Oracle(scripts.pop())
            found[run(oracle)] += oracle.probability
            scripts += oracle.forks
    return found


def deviation(found, wanted) -> float:
    """The largest difference of two {text: probability}."""
    return max(abs(found.get(text, 0) - wanted.get(text, 0)) for text in {*found, *wanted})


def text_probs(model, prompt, new, params, change=None, end=None):
    """{text: probability} of a table target, each text computed by itself.

    change: what the tokens so far and the logits [V] become, before temperature. end: a token that ends texts.
    """
    texts = Counter()
    for text in itertools.product(range(model.vocab_size), repeat=new):
        logits = model.model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].double()
        probability = 1.0
        for at, token in enumerate(text):
            row = change([*prompt, *text[:at]], logits[at]) if change else logits[at]
            probability *= float(compute_probs(row, params)[token])
        texts[text[: text.index(end) + 1] if end in text else text] += probability
    return +texts


TEXT_PROB_TOLERANCE = 1e-6
SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p"}


@cache
def text_probs_by_way(target, way):
    by = WAYS[way]
    params = SamplingParams(**{name: by.options[name] for name in SAMPLING_FIELDS & by.options.keys()})
    return text_probs(target, PROMPT, NEW, params, by.change, by.end)


def enumerate_texts(spec, way="top-k", batch=64, **how):
    """The largest deviation of a text's probability, and the mean number of cycles."""
    by = WAYS[way]
    texts, cycles = enumerate_decoding(spec, PROMPT, batch, max_new_tokens=NEW, **how, **by.options).distribution()
    return deviation(texts, text_probs_by_way(spec.target, way)), cycles


ERROR_PROBABILITY = 1e-4  # probability that a test of this file fails by chance, each


def chi_square(counts, probabilities):
    """χ² and its degrees of freedom; cells with fewer than 3 expected are taken together."""
    total = sum(counts)
    small = [i for i, p in enumerate(probabilities) if p * total < 3]
    large = [i for i in range(len(counts)) if i not in small]
    cells = [(counts[i], probabilities[i] * total) for i in large]
    cells.append((sum(counts[i] for i in small), sum(probabilities[i] for i in small) * total))
    cells = [(count, expected) for count, expected in cells if expected > 0.5]
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1
