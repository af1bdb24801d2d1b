"""What one forward costs: the target's over a tree, and the head's step, by nodes and context."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from treespec.api.spec import Spec
from treespec.draft.proposer import Frontier
from treespec.eval.bench.config import NODES
from treespec.eval.bench.figures import median
from treespec.eval.bench.result import ForwardTime, Work
from treespec.eval.bench.waiting import seconds
from treespec.eval.common import in_order
from treespec.trees.tree import TokenTree

FRONTIERS = (1, 4, 10)  # nodes of a head's step
WAITING = 3  # accepted tokens that the head reads at the beginning of a cycle
WARM_UP = 2  # rounds


@dataclass(frozen=True)
class ForwardCase:
    """One forward to time. what, nodes, context: as in `ForwardTime`."""

    what: Work
    nodes: int
    context: int


@torch.inference_mode()
def forward_times(
    spec: Spec,
    contexts: list[int],
    rounds: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
) -> list[ForwardTime]:
    """The median ms of every forward over `rounds` rounds; all cases take turns in each round."""
    # 1. A cache and a draft state for each context, and the forwards to time behind it.
    places = {context: Place(spec, context, seed) for context in contexts}
    sizes: dict[Work, tuple[int, ...]] = {"target": NODES}
    if spec.proposer:
        sizes |= {"begin": (WAITING,), "extend": FRONTIERS}
    works = [(what, nodes) for what in sizes for nodes in sizes[what]]
    cases = [ForwardCase(*work, context) for context in contexts for work in works]

    # 2. Rounds; those of the warm-up do not count.
    times: dict[ForwardCase, list[float]] = defaultdict(list)
    for round_number in range(WARM_UP + rounds):
        for case in in_order(cases, round_number):
            spent = places[case.context].time(case)
            if round_number >= WARM_UP:
                times[case].append(1000 * spent)
        report(f"forwards, round {round_number + 1} of {WARM_UP + rounds}")

    # 3. Medians.
    return [
        ForwardTime(what=c.what, nodes=c.nodes, context=c.context, ms=median(times[c], seed))
        for c in cases
    ]


@final
class Place:
    """A target's cache, and a draft model's if there is one, behind `context` random tokens."""

    def __init__(self, spec: Spec, context: int, seed: int) -> None:
        self.target, self.context = spec.target, context
        self.cache = spec.target.new_cache()
        self.proposer = spec.proposer.new() if spec.proposer else None
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(spec.target.vocab_size, (context + 1,), generator=generator)
        taps = self.proposer.taps if self.proposer else ()
        self.features = self.target.prefill(self.cache, self.tokens[None, :-1], taps)[0]  # [P, H]
        if self.proposer:
            self.proposer.observe([self.features], [self.tokens])
            self.begin()

    def time(self, case: ForwardCase) -> float:
        """Seconds of one forward. The caches hold the same positions before and after."""
        # 1. The target's forward over a tree.
        device = self.target.output_device
        if case.what == "target":
            tree = star(case.nodes, self.target.vocab_size, device)
            return seconds(lambda: self.target.forward_tree(self.cache, tree), device)

        # 2. The draft model's forward over the accepted tokens of a cycle.
        proposer = self.proposer
        assert proposer
        again = torch.arange(WAITING + 1) % self.context
        proposer.observe([self.features[again[1:].to(self.features.device)]], [self.tokens[again]])
        spent = seconds(self.begin, device)

        # 3. Its forward over one level.
        if case.what == "extend":
            zeros = torch.zeros(case.nodes, dtype=torch.int64, device=device)
            spent = seconds(lambda: proposer.extend([Frontier(zeros, zeros)]), device)
        proposer.rewind([self.context])
        return spent

    def begin(self) -> None:
        """The draft model's forward over all positions that it observed since the last one."""
        assert self.proposer
        self.proposer.begin(self.tokens[-1:].to(self.target.output_device), self.cache)


def star(nodes: int, vocab_size: int, device: torch.device) -> TokenTree:
    """A root and its children. The cost of a forward depends on the number of nodes alone."""
    index = torch.arange(nodes, device=device)
    depth = (index > 0).long()
    ancestors = torch.eye(nodes, dtype=torch.bool, device=device)
    ancestors[:, 0] = True
    return TokenTree(index % vocab_size, depth - 1, depth, ancestors)
