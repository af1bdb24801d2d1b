"""What one forward costs: the target's over a tree, and the head's step, by nodes and context."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from treespec.draft.proposer import Frontier
from treespec.eval.bench.config import NODES
from treespec.eval.bench.figures import median
from treespec.eval.bench.split import seconds
from treespec.eval.common import in_order
from treespec.spec import Spec
from treespec.trees.tree import TokenTree

FRONTIERS = (1, 4, 10)  # nodes of a head's step
WAITING = 3  # accepted tokens that a cycle begins with
WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Case:
    """what: "target" over a tree of `nodes`, "begin" of a cycle over as many tokens, "extend" by a level."""

    what: str
    nodes: int
    context: int


@torch.inference_mode()
def forwards(
    spec: Spec,
    contexts: list[int],
    rounds: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """[{what, nodes, context, ms: {value, low, high}}]: medians over rounds, in each of which all cases take turns."""
    places = {context: Place(spec, context, seed) for context in contexts}
    sizes: dict[str, tuple[int, ...]] = {"target": NODES}
    if spec.proposer:
        sizes |= {"begin": (WAITING,), "extend": FRONTIERS}
    cases = [
        Case(what, nodes, context)
        for context in contexts
        for what in sizes
        for nodes in sizes[what]
    ]
    times = defaultdict(list)
    for number in range(WARM_UP + rounds):
        for case in in_order(cases, number):
            spent = places[case.context].time(case)
            if number >= WARM_UP:
                times[case].append(1000 * spent)
        report(f"forwards, round {number + 1} of {WARM_UP + rounds}")
    return [asdict(case) | {"ms": median(times[case], seed)} for case in cases]


@final
class Place:
    """A target's cache and a draft model's, if there is one, behind a text of random tokens."""

    def __init__(self, spec: Spec, context: int, seed: int) -> None:
        self.target, self.context = spec.target, context
        self.cache, self.proposer = (
            spec.target.new_cache(),
            spec.proposer.new() if spec.proposer else None,
        )
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(spec.target.vocab_size, (context + 1,), generator=generator)
        taps = self.proposer.taps if self.proposer else ()
        self.features = self.target.prefill(self.cache, self.tokens[None, :-1], taps)[0]  # [P, H]
        if self.proposer:
            self.proposer.observe([self.features], [self.tokens])
            self.begin()

    def time(self, case: Case) -> float:
        """Seconds of one forward, after which all is as before."""
        if case.what == "target":
            tree = star(case.nodes, self.target.vocab_size, self.target.output_device)
            return seconds(
                lambda: self.target.forward_tree(self.cache, tree), self.target.output_device
            )
        proposer = self.proposer
        assert proposer
        again = torch.arange(WAITING + 1) % self.context
        proposer.observe([self.features[again[1:].to(self.features.device)]], [self.tokens[again]])
        spent = seconds(self.begin, self.target.output_device)
        if case.what == "extend":
            zeros = torch.zeros(case.nodes, dtype=torch.int64, device=self.target.output_device)
            spent = seconds(
                lambda: proposer.extend([Frontier(zeros, zeros)]), self.target.output_device
            )
        proposer.rewind([self.context])
        return spent

    def begin(self) -> None:
        assert self.proposer
        self.proposer.begin(self.tokens[-1:].to(self.target.output_device), self.cache)


def star(nodes: int, vocab_size: int, device: torch.device) -> TokenTree:
    """A root and its children: what a forward costs depends on the number of nodes alone."""
    number = torch.arange(nodes, device=device)
    below = (number > 0).long()
    ancestors = torch.eye(nodes, dtype=torch.bool, device=device)
    ancestors[:, 0] = True
    return TokenTree(number % vocab_size, below - 1, below, ancestors)
