"""Every text that a decoding can give, with its exact probability: an oracle makes the draws.

The oracle stands behind each function that uses a generator (`treespec.sampling.probs`) and follows a script
of outcomes. Past its end it takes the first possible outcome and notes the others, which are replayed later, depth
first, through the real loop. Sequences with equal tokens whose cycles had equal sizes and paths go on as one: a
drafter's state is a function of these.
"""

import itertools
import math
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from treespec.engine import decoder as decode
from treespec.sampling import probs as sampling
from treespec.sampling.probs import probs
from treespec.verify import rrs
from treespec.verify.distributions import without

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


def sample(law, generator):
    rows = law.double().reshape(-1, law.shape[-1]).tolist()
    return torch.tensor([generator.choose(row) for row in rows], dtype=torch.int64).view(law.shape[:-1])


def sample_each(law, number, generator):
    return sample(law[:, None].expand(-1, number, -1), generator)


def happens(probability, generator):
    return sample(torch.stack([1 - probability, probability], dim=-1).clamp(0, 1), generator) > 0


def judge_all(verifier, trees, logits, laws, generators):
    verdicts = JUDGE(verifier, trees, logits, laws, generators)
    for tree, verdict, oracle in zip(trees, verdicts, generators, strict=True):
        if isinstance(verdict, Exception):
            raise verdict
        oracle.cycles += ((len(tree.tokens), *verdict.path),)
    return verdicts


JUDGE = decode.judge_all


def in_turn(q, width, generator):
    """Distinct draws for `rrs-wo`, which itself makes independent ones and drops repeats."""
    tokens = torch.empty(len(q), 0, dtype=torch.int64)
    for _ in range(width):
        token = sample(without(q, tokens), generator)[:, None]
        tokens = torch.cat([tokens, token.masked_fill(token >= q.shape[-1], -1)], dim=1)
    return tokens


@contextmanager
def behind_every_draw():
    """Inside, all draws of the package are the oracle's."""
    modules = [module for name, module in sys.modules.items() if name.startswith("treespec.")]
    with ExitStack() as stack:
        for ours in (sample, sample_each, happens):
            theirs = vars(sampling)[ours.__name__]
            for module in modules:
                if vars(module).get(ours.__name__) is theirs:
                    stack.enter_context(mock.patch.object(module, ours.__name__, ours))
        stack.enter_context(mock.patch.multiple(rrs, SPARE=1, independent=in_turn))
        stack.enter_context(mock.patch.object(decode, "judge_all", judge_all))
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


def outcomes(
    spec,
    prompt,
    batch=BATCH,
    recall=False,
    reuse=True,
    **options,
):
    """Replay all that can happen to a completion.

    recall: whether it is drafted from the suffix cache.
    reuse: whether a sequence takes over the cache of one that has ended.
    """
    found = Outcomes()
    scripts = [()]
    running = []
    decoder = spec.decoder
    with behind_every_draw(), torch.inference_mode():
        while scripts or running:
            # 1. Sequences whose scripts end in an outcome that none has had.
            entering = []
            while scripts and len(entering) + len(running) < batch:
                text = spec.request(prompt, seed=0, remember=False, **options)
                text.generator = Oracle(scripts.pop())
                text.distribution.seeded = not recall
                entering.append(text)
                found.replays += 1

            # 2. A cycle of all.
            decoder.rows.kept = decoder.rows.kept if reuse else []
            decoder.step(entering)
            running += entering
            for text in running:
                if text.error:
                    raise text.error
                scripts += found.note(text)
            running = [text for text in running if not text.ended]
    return found


def chances_of(run):
    """{what `run` gives with a generator: probability}, over all draws."""
    found = Counter()
    scripts = [()]
    with behind_every_draw():
        while scripts:
            oracle = Oracle(scripts.pop())
            found[run(oracle)] += oracle.probability
            scripts += oracle.forks
    return found


def deviation(found, wanted):
    """The largest difference of two {text: probability}."""
    return max(abs(found.get(text, 0) - wanted.get(text, 0)) for text in {*found, *wanted})


def verdict_texts(verifier, tree, p):
    """{tokens of the verdict: probability}. The path must carry all of them but the last."""

    def text(oracle):
        verdict = verifier(tree, p, oracle)
        kept = verdict.tokens[: len(verdict.path)]
        assert tree.tokens[verdict.path].tolist() == kept
        assert tree.parents[verdict.path].tolist() == [0, *verdict.path][: len(kept)]
        return tuple(verdict.tokens)

    return chances_of(text)


def distribution(
    model,
    prompt,
    new,
    params,
    change=None,
    end=None,
):
    """{text: probability} of a table target, each text computed by itself.

    change: what the tokens so far and the logits [V] become, before temperature. end: a token that ends texts.
    """
    texts = Counter()
    for text in itertools.product(range(model.vocab_size), repeat=new):
        logits = model.model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].double()
        probability = 1.0
        for at, token in enumerate(text):
            row = change([*prompt, *text[:at]], logits[at]) if change else logits[at]
            probability *= float(probs(row, params)[token])
        texts[text[: text.index(end) + 1] if end in text else text] += probability
    return +texts
