"""Every tree that can be drawn below a root, and the law of the texts that a verifier makes of them."""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from enumeration import outcomes
from equality import seeded
from oracle import verdict_texts

from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws, TokenTree

Path = tuple[int, ...]  # of draws, as in StaticTree; it has a node if the static tree has it
Text = tuple[int, ...]  # what follows the root
Law = list[float]


@dataclass(frozen=True)
class Tables:
    """The target's and the draft's next-token laws after every text up to some length."""

    p: dict[Text, Law]
    q: dict[Text, Law]

    @property
    def vocabulary(self):
        return len(self.p[()])

    def of_sequences(self, length):
        """{text: probability} under the target."""
        return self.completed({(): 1.0}, length)

    def completed(self, texts, length):
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


def random_tables(vocabulary, depth, seed, noise=1.0, zeros=False):
    generator = seeded(seed)
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
    def nodes(self):
        return StaticTree(tuple(path for path in self.draws.paths[1:] if path not in self.pruned))

    @property
    def length(self):
        """Tokens of the longest verdict where all draws have nodes."""
        return self.draws.max_depth + 1


@dataclass(frozen=True)
class Drawn:
    """One tree. draws: the tokens at each inner node, -1 for an absent draw. texts: down to each draw there is."""

    shape: Shape
    tables: Tables
    draws: dict[Path, Text]
    texts: dict[Path, Text]

    def children(self, path):
        """The draws below a node, also those without a node."""
        return [(*path, k) for k, token in enumerate(self.draws.get(path, ())) if token >= 0]

    def has_node(self, path):
        return path in self.shape.nodes.paths

    def tensors(self, dtype=torch.float64):
        """The tree as it goes to a verifier, and p [N, V]. Below an absent draw laws are uniform, tokens are 0."""
        paths, fixed = self.shape.nodes.paths, layout(self.shape.nodes, torch.device("cpu"))
        inner = [i for i, path in enumerate(paths) if path in self.draws]
        uniform = [1 / self.tables.vocabulary] * self.tables.vocabulary

        def laws(table, nodes):
            known = [self.texts.get(paths[node]) for node in nodes]
            return torch.tensor([uniform if text is None else table[text] for text in known], dtype=dtype)

        tokens = [self.draws[path[:-1]][path[-1]] if path else 0 for path in paths]
        width = max(map(len, self.draws.values()))
        table = torch.tensor([(*self.draws[paths[i]], *[-1] * width)[:width] for i in inner])
        drafts = Drafts(torch.tensor(inner), laws(self.tables.q, inner), Draws(table))
        tree = TokenTree(torch.tensor(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)
        return tree, laws(self.tables.p, list(range(len(paths))))


def trees(scheme, shape, tables):
    """Every tree that can be drawn, with its probability."""
    paths = shape.draws.paths
    inner = [path for path in paths if any(other[:-1] == path for other in paths[1:])]

    @cache
    def found(text, k):
        return outcomes(scheme, torch.tensor(tables.q[text], dtype=torch.float64), k)

    def grow(drawn, rest, probability):
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


def text_law(verifier, shape, tables, dtype=torch.float64):
    """{text: probability} of max_depth + 1 tokens over all trees and coins, and the mean tokens of a verdict."""
    texts, mean = defaultdict(float), 0.0
    for drawn, probability in trees(verifier.scheme.name, shape, tables):
        for text, mass in verdict_texts(verifier, *drawn.tensors(dtype)).items():
            texts[text] += probability * mass
            mean += probability * mass * len(text)
    return tables.completed(texts, shape.length), mean


def deviation(found, expected):
    return max(abs(found.get(text, 0) - expected.get(text, 0)) for text in found.keys() | expected.keys())
