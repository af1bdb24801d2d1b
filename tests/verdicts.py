"""A slow reference for the verifiers of whole trees, in plain Python: every tree, and the law of the verdict on it."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from enumeration import outcomes
from torch import Tensor

from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.registry import scheme_by_name

Path = tuple[int, ...]  # of draws, as in StaticTree; it has a node if the static tree has it
Text = tuple[int, ...]  # what follows the root
Law = list[float]


@dataclass(frozen=True)
class Tables:
    """The target's and the draft's next-token laws after every text up to some length."""

    p: dict[Text, Law]
    q: dict[Text, Law]

    @property
    def vocabulary(self) -> int:
        return len(self.p[()])

    def of_sequences(self, length: int) -> dict[Text, float]:
        """{text: probability} under the target."""
        return self.completed({(): 1.0}, length)

    def completed(self, texts: dict[Text, float], length: int) -> dict[Text, float]:
        """The law of texts that the target continues to a length."""
        law = dict(texts)
        for _ in range(length):
            longer: dict[Text, float] = defaultdict(float)
            for text, mass in law.items():
                ends = enumerate(self.p[text]) if len(text) < length else [(None, 1.0)]
                for token, chance in ends:
                    longer[text if token is None else (*text, token)] += mass * chance
            law = longer
        return {text: mass for text, mass in law.items() if mass > 0}


def random_tables(vocabulary: int, depth: int, seed: int, noise: float = 1.0, zeros: bool = False) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    p, q = {}, {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocabulary), repeat=length):
            logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
            other = logits + noise * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
            if zeros:
                for row in (logits, other):  # at most one token, half the time
                    row[torch.randint(2 * vocabulary, (1,), generator=generator) :][:1] = -torch.inf
            p[text], q[text] = logits.softmax(-1).tolist(), other.softmax(-1).tolist()
    return Tables(p, q)


@dataclass(frozen=True)
class Shape:
    """What is drawn, and which of the last draws have no node."""

    draws: StaticTree
    pruned: tuple[Path, ...] = ()

    @cached_property
    def nodes(self) -> StaticTree:
        return StaticTree(tuple(path for path in self.draws.paths[1:] if path not in self.pruned))

    @property
    def length(self) -> int:
        """Tokens of the longest verdict where all draws have nodes."""
        return self.draws.max_depth + 1


@dataclass(frozen=True)
class Drawn:
    """One tree. draws: the tokens at each inner node, -1 for an absent draw. texts: down to each draw there is."""

    shape: Shape
    tables: Tables
    draws: dict[Path, Text]
    texts: dict[Path, Text]

    def children(self, path: Path) -> list[Path]:
        """The draws below a node, also those without a node."""
        return [(*path, k) for k, token in enumerate(self.draws.get(path, ())) if token >= 0]

    def has_node(self, path: Path) -> bool:
        return path in self.shape.nodes.paths

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[TokenTree, Tensor]:
        """The tree as it goes to a verifier, and p [N, V]. Below an absent draw laws are uniform, tokens are 0."""
        paths, fixed = self.shape.nodes.paths, layout(self.shape.nodes, torch.device("cpu"))
        inner = [i for i, path in enumerate(paths) if path in self.draws]
        uniform = [1 / self.tables.vocabulary] * self.tables.vocabulary

        def laws(table: dict[Text, Law], nodes: list[int]) -> Tensor:
            known = [self.texts.get(paths[node]) for node in nodes]
            return torch.tensor([uniform if text is None else table[text] for text in known], dtype=dtype)

        tokens = [self.draws[path[:-1]][path[-1]] if path else 0 for path in paths]
        width = max(map(len, self.draws.values()))
        table = torch.tensor([(*self.draws[paths[i]], *[-1] * width)[:width] for i in inner])
        drafts = Drafts(torch.tensor(inner), laws(self.tables.q, inner), Draws(table))
        tree = TokenTree(torch.tensor(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)
        return tree, laws(self.tables.p, list(range(len(paths))))


def trees(scheme: str, shape: Shape, tables: Tables) -> Iterator[tuple[Drawn, float]]:
    """Every tree that can be drawn, with its probability."""
    paths = shape.draws.paths
    inner = [path for path in paths if any(other[:-1] == path for other in paths[1:])]

    @cache
    def found(text: Text, k: int) -> list[tuple[Text, float]]:
        return outcomes(scheme, torch.tensor(tables.q[text], dtype=torch.float64), k)

    def grow(drawn: Drawn, rest: list[Path], probability: float) -> Iterator[tuple[Drawn, float]]:
        if not rest:
            yield drawn, probability
            return
        path, k = rest[0], shape.draws.draws(rest[0])
        text = drawn.texts.get(path)
        for tokens, chance in [((0,) * k, 1.0)] if text is None else found(text, k):
            below = {} if text is None else {(*path, i): (*text, x) for i, x in enumerate(tokens) if x >= 0}
            new = Drawn(shape, tables, drawn.draws | {path: tokens}, drawn.texts | below)
            yield from grow(new, rest[1:], probability * chance)

    yield from grow(Drawn(shape, tables, {}, {(): ()}), inner, 1.0)


def positive(law: Law) -> Law:
    return [max(0.0, mass) for mass in law]


def finish(verdicts: dict[Text, float], drawn: Drawn, path: Path, law: Law, mass: float) -> None:
    """The verdict ends at a draw: with a token from a law that need not be normalised, if it has a node."""
    if not drawn.has_node(path):
        verdicts[drawn.texts[path]] += mass
    elif mass > 0:
        for token, part in enumerate(law):
            verdicts[(*drawn.texts[path], token)] += mass * part / sum(law)


def block(drawn: Drawn, weighted: bool = True) -> dict[Text, float]:
    """Sun et al., algorithm 2: all coins, then the longest prefix whose coin succeeded."""
    paths: list[Path] = [()]
    while below := drawn.children(paths[-1]):
        paths += below
    weight = 1.0
    kept, rests = [], []
    for i, path in enumerate(paths):
        p, q = drawn.tables.p.get(drawn.texts[path], []), drawn.tables.q.get(drawn.texts[path], [])
        if i == len(paths) - 1:
            kept.append(weight if i else 1.0)
            rests.append(p)
            break
        rests.append(positive([(weight if weighted else 1.0) * a - b for a, b in zip(p, q, strict=True)]))
        left = sum(rests[-1])
        kept.append(left / (left + (1 - weight)) if left else float(not i))
        token = drawn.texts[paths[i + 1]][-1]
        weight = min(1.0, weight * p[token] / q[token])
    verdicts: dict[Text, float] = defaultdict(float)
    missed = 1.0
    for path, coin, rest in reversed(list(zip(paths, kept, rests, strict=True))):
        finish(verdicts, drawn, path, rest, missed * coin)
        missed *= 1 - coin
    return verdicts


def traversal(drawn: Drawn, weighted: bool = True, fresh: bool = True) -> dict[Text, float]:
    """2505.12398, step by step: the first leaf is accepted, or deleted and all weights below its parent redone."""
    p = {path: list(drawn.tables.p[text]) for path, text in drawn.texts.items() if drawn.has_node(path)}
    q = {path: list(drawn.tables.q[text]) for path, text in drawn.texts.items() if path in drawn.draws}
    alive = {path: drawn.children(path) for path in drawn.texts}
    weights: dict[Path, float] = {(): 1.0}

    def weigh(path: Path) -> None:
        for child in alive[path]:
            token = drawn.texts[child][-1]
            weights[child] = min(1.0, weights[path] * p[path][token] / q[path][token]) if q[path][token] else 0.0
            weigh(child)

    weigh(())
    verdicts: dict[Text, float] = defaultdict(float)
    reach = 1.0
    while True:
        path: Path = ()
        while alive[path]:
            path = alive[path][0]
        accept = weights[path] if path else 1.0
        finish(verdicts, drawn, path, p.get(path, []), reach * accept)
        if not path:
            return verdicts
        reach *= 1 - accept
        parent = path[:-1]
        alive[parent].pop(0)
        weight = weights[parent] if weighted else 1.0
        rest = positive([weight * a - b for a, b in zip(p[parent], q[parent], strict=True)])
        left = sum(rest)
        p[parent] = [mass / left for mass in rest] if left else p[parent]
        weights[parent] = left / (left + (1 - weights[parent])) if left else 0.0
        q[parent][drawn.texts[path][-1]] = 0.0
        q[parent] = [mass / sum(q[parent]) for mass in q[parent]] if sum(q[parent]) else q[parent]
        if fresh:
            weigh(parent)


def greedy_part(p: Law, q: Law, draws: Text) -> tuple[Law, Law]:
    """Tokens drawn for sure, then one of law q' = q without them, for a part of p: accepted [K], what is left [V]."""
    *tops, last = draws
    q = [0.0 if x in tops else mass for x, mass in enumerate(q)]
    law = [mass / sum(q) for mass in q]
    accepted = min(1.0, p[last] / law[last])
    refused = 1 - sum(map(min, p, law))
    left = [0.0 if x in tops else max(0.0, a - b) for x, (a, b) in enumerate(zip(p, law, strict=True))]
    return [(1 - accepted) * p[x] / refused if p[x] else 0.0 for x in tops] + [accepted], left


def layer(drawn: Drawn, weighted: bool = True) -> dict[Text, float]:
    """Weights down, layer by layer; then up, keeping the deepest layer whose coin succeeds."""
    weights: dict[Path, float] = {(): 1.0}
    leaving: dict[Path, tuple[float, Law]] = {}
    here: list[Path] = [()]
    layers: list[list[Path]] = []
    while here:
        layers.append(here)
        total = sum(weights[path] for path in here if path in drawn.draws)
        for path in here:
            if not drawn.children(path):
                leaving[path] = weights[path], drawn.tables.p[drawn.texts[path]] if drawn.has_node(path) else []
                continue
            share = weights[path] / total if total else 0.0
            part = total if weighted else 1.0
            p, q = drawn.tables.p[drawn.texts[path]], drawn.tables.q[drawn.texts[path]]
            present = tuple(x for x in drawn.draws[path] if x >= 0)
            accepted, left = greedy_part([part * mass for mass in p], q, present)
            weights |= {child: share * mass for child, mass in zip(drawn.children(path), accepted, strict=True)}
            leaving[path] = share * sum(left), left
        here = [child for path in here for child in drawn.children(path)]
    verdicts: dict[Text, float] = defaultdict(float)
    missed = 1.0
    for here in reversed(layers):
        mass, rest = sum(leaving[path][0] for path in here), 1 - sum(weights[path] for path in here)
        coin = mass / (mass + rest) if mass else 0.0
        for path in here:
            if coin:
                finish(verdicts, drawn, path, leaving[path][1], missed * coin * leaving[path][0] / mass)
        missed *= 1 - coin
    return verdicts


def walk(scheme: str) -> Callable[[Drawn], dict[Text, float]]:
    """The walk over a scheme's plan."""
    answers = scheme_by_name(scheme)

    def verdict(drawn: Drawn) -> dict[Text, float]:
        verdicts: dict[Text, float] = defaultdict(float)
        tree, rows = drawn.tensors()
        assert tree.drafts
        plans = answers.plan(rows[tree.drafts.nodes], tree.drafts.q, tree.drafts.draws).tolist()
        plan_of = {
            drawn.shape.nodes.paths[node]: plan for node, plan in zip(tree.drafts.nodes.tolist(), plans, strict=True)
        }

        def visit(path: Path, mass: float) -> None:
            plan = plan_of.get(path, drawn.tables.p[drawn.texts[path]])
            child_of = {drawn.texts[child][-1]: child for child in drawn.children(path) if drawn.has_node(child)}
            for token, part in enumerate(plan):
                if token in child_of and mass * part:
                    visit(child_of[token], mass * part)
                else:
                    verdicts[(*drawn.texts[path], token)] += mass * part

        visit((), 1.0)
        return verdicts

    return verdict


def expected_length(verdicts: dict[Text, float]) -> float:
    """Tokens of a verdict, on average."""
    return sum(len(text) * mass for text, mass in verdicts.items())
