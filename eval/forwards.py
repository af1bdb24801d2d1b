"""What one forward costs: the target's over a tree, and the head's step, by nodes and context."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from treespec.api.spec import Spec
from treespec.draft.proposer import Frontier
from treespec.errors import InputError
from treespec.eval.answering import wait
from treespec.eval.bootstrap import interval, medians, resample
from treespec.eval.common import in_order
from treespec.trees.tree import TokenTree

NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # of the target's tree
FRONTIERS = (1, 4, 10)  # nodes of a head's step
WAITING = 3  # accepted tokens that the head reads at the beginning of a cycle
WARM_UP, ROUNDS = 2, 20

Work = Literal["target", "begin", "extend"]


@dataclass(frozen=True)
class ForwardCase:
    """One forward to time.

    what: "target" over a tree of `nodes`; the head's "begin" of a cycle over `nodes` tokens; the
    head's "extend" by a level of `nodes`. context: tokens in the cache.
    """

    what: Work
    nodes: int
    context: int


def check_room(contexts: Sequence[int], context_length: int) -> None:
    """Raises InputError for a context that leaves a target no room for the largest tree."""
    most = context_length - NODES[-1]
    if contexts and max(contexts) > most:
        raise InputError(
            f"--contexts {max(contexts)}: the target's context holds {context_length} tokens, "
            f"{NODES[-1]} nodes included; give at most {most}"
        )


@torch.inference_mode()
def forward_times(spec: Spec, contexts: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """The fields of every `ForwardCase` and its median `ms`; in each round all cases take turns."""
    # 1. A cache and a draft state for each context, and the forwards to time after it.
    places = {context: Place(spec, context, seed) for context in contexts}
    works: list[tuple[Work, int]] = [("target", nodes) for nodes in NODES]
    if spec.proposer:
        works += [("begin", WAITING), *(("extend", nodes) for nodes in FRONTIERS)]
    cases = [ForwardCase(*work, context) for context in contexts for work in works]

    # 2. Rounds; those of the warm-up do not count.
    times: dict[ForwardCase, list[float]] = defaultdict(list)
    for number in range(WARM_UP + ROUNDS):
        for case in in_order(cases, number):
            spent = places[case.context].time(case)
            times[case] += [1000 * spent] if number >= WARM_UP else []

    # 3. Medians.
    draws = resample(ROUNDS, 1000, seed)
    figures = {case: interval(medians(np.array(times[case]), draws)) for case in cases}
    return [asdict(case) | {"ms": figure} for case, figure in figures.items()]


@final
class Place:
    """A target's cache, and a draft model's if there is one, after `context` random tokens."""

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
        device, proposer = self.target.output_device, self.proposer
        if case.what == "target" or proposer is None:
            tree = star(case.nodes, self.target.vocab_size, device)
            return seconds(lambda: self.target.forward_tree(self.cache, tree), device)

        # 2. The draft model's forward over the accepted tokens of a cycle, and over one level.
        again = torch.arange(WAITING + 1) % self.context
        proposer.observe([self.features[again[1:].to(self.features.device)]], [self.tokens[again]])
        spent = seconds(self.begin, device)
        if case.what == "extend":
            zeros = torch.zeros(case.nodes, dtype=torch.int64, device=device)
            spent = seconds(lambda: proposer.extend([Frontier(zeros, zeros)]), device)
        proposer.rewind([self.context])
        return spent

    def begin(self) -> None:
        """The draft model's forward over all positions that it observed since the last one."""
        assert self.proposer
        self.proposer.begin(self.tokens[-1:].to(self.target.output_device), self.cache)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def star(nodes: int, vocab_size: int, device: torch.device) -> TokenTree:
    """A root and its children. The cost of a forward depends on the number of nodes alone."""
    index = torch.arange(nodes, device=device)
    depth = (index > 0).long()
    ancestors = torch.eye(nodes, dtype=torch.bool, device=device)
    ancestors[:, 0] = True
    return TokenTree(index % vocab_size, depth - 1, depth, ancestors)
