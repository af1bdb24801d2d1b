"""What one forward costs: the target's over a tree, and the head's step, by nodes and context."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from treespec.api.spec import Spec
from treespec.draft.cost.measure import branch
from treespec.draft.drafter import Frontier
from treespec.errors import InputError
from treespec.eval.answering import wait
from treespec.eval.common import in_order
from treespec.eval.intervals import median

NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # of the target's tree
FRONTIERS = (1, 4, 10)  # nodes of a head's step
WAITING = 3  # accepted tokens that the head reads at the beginning of a cycle
WARM_UP, ROUNDS = 2, 20

Work = Literal["target", "begin", "extend"]


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
    """Every forward and its median time; in each round all forwards take turns.

    what: "target" over a tree of `nodes`; the head's "begin" of a cycle over `nodes` tokens; the
    head's "extend" by a level of `nodes`. context: tokens in the cache. ms: a `Figure`.
    """
    # 1. The forwards after each context.
    works: list[tuple[Work, int]] = [("target", nodes) for nodes in NODES]
    if spec.proposer:
        works += [("begin", WAITING), *(("extend", nodes) for nodes in FRONTIERS)]
    timers = {context: timer(spec, context, seed) for context in contexts}
    cases = [(context, work) for context in contexts for work in works]

    # 2. Rounds; those of the warm-up do not count.
    times: dict[tuple[int, tuple[Work, int]], list[float]] = defaultdict(list)
    for number in range(WARM_UP + ROUNDS):
        for context, work in in_order(cases, number):
            times[context, work].append(1000 * timers[context](*work))

    # 3. Medians.
    return [
        {
            "what": what,
            "nodes": nodes,
            "context": context,
            "ms": median(times[context, (what, nodes)][WARM_UP:], seed),
        }
        for context, (what, nodes) in cases
    ]


def timer(spec: Spec, context: int, seed: int) -> Callable[[Work, int], float]:
    """What times a forward in seconds, after `context` random tokens, which the caches hold again then."""
    # 1. A target's cache, and a draft model's if there is one.
    target, device = spec.target, spec.target.output_device
    cache, proposer = target.new_cache(), spec.proposer.new() if spec.proposer else None
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(target.vocab_size, (context + 1,), generator=generator)
    features = target.prefill(cache, tokens[None, :-1], proposer.taps if proposer else ())[0]
    root, any_tokens = tokens[-1:].to(device), torch.arange(NODES[-1], device=device)
    if proposer:
        proposer.observe([features], [tokens])
        proposer.begin(root, cache)

    def timed(what: Work, nodes: int) -> float:
        # 2. The target's forward over a tree.
        if what == "target" or proposer is None:
            tree = branch(nodes, any_tokens % target.vocab_size)
            return seconds(lambda: target.forward_tree(cache, tree), device)

        # 3. The draft model's forward over the accepted tokens of a cycle, and over one level.
        again = torch.arange(WAITING + 1) % context
        proposer.observe([features[again[1:].to(features.device)]], [tokens[again]])
        spent = seconds(lambda: proposer.begin(root, cache), device)
        if what == "extend":
            zeros = torch.zeros_like(root).expand(nodes)  # a token that every draft vocabulary has
            level = Frontier(zeros, zeros)
            spent = seconds(lambda: proposer.extend([level]), device)
        proposer.rewind([context])
        return spent

    return timed


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started
