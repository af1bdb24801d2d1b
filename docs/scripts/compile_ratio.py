"""Interleaved times of forwards: eager, by `Target.compile`, and by `treespec.model.compile`.

One thread is timed by the process's own time, which other work on the machine disturbs least.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

from treespec.draft.fit.measure import path
from treespec.draft.sources import source_of
from treespec.draft.trained.eagle import EagleProposer
from treespec.model.compile import compile_layers
from treespec.target import Target

WAYS = ("eager", "regions", "small")
NODES, FRONTIERS, CONTEXT = (1, 4, 8, 16, 26), (1, 6), 200


def steps_of(way: str, target_folder: str, head_folder: str) -> dict[str, Callable[[], object]]:
    """Forwards over trees and steps of the head, compiled in one of the ways."""
    target = Target.load(target_folder, dtype="float32")
    head = source_of(f"head:{head_folder}", target)
    if way == "regions":
        target.compile()
    elif way == "small":
        compile_layers(target.stack)
        compile_layers([head])

    tokens = torch.arange(CONTEXT)
    cache = target.new_cache()
    features = target.prefill(cache, tokens[None], head.taps)[0]
    proposer = EagleProposer(head, target)
    proposer.observe([features[:-1]], [tokens])
    proposer.begin(tokens[-1:], cache)
    length = proposer.cache.end

    def step(nodes: int) -> None:
        proposer.cache.tree_layers[0].length = length
        positions = torch.full((1, 1), CONTEXT)
        seen = torch.ones(1, nodes, length + nodes, dtype=torch.bool)
        proposer._forward(
            tokens[None, :nodes], features[None, :nodes].contiguous(), positions, seen
        )

    trees = {f"{n} nodes": partial(target.forward_tree, cache, path(n, tokens)) for n in NODES}
    return trees | {f"head, {n} nodes": partial(step, n) for n in FRONTIERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    measure(**vars(parser.parse_args()))


@torch.inference_mode()
def measure(target: str, head: str, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    steps = {}
    for way in WAYS:
        started = time.perf_counter()
        steps[way] = steps_of(way, target, head)
        for step in steps[way].values():
            step()
        print(f"{way}: ready after {time.perf_counter() - started:.1f} s", flush=True)

    times = defaultdict(list)
    for _ in range(rounds):
        for name in steps["eager"]:
            for way in WAYS:
                started = clock()
                steps[way][name]()
                times[name, way].append(1e3 * (clock() - started))
    for name in steps["eager"]:
        eager, regions, small = (statistics.median(times[name, way]) for way in WAYS)
        kept = (eager - small) / (eager - regions)
        shown = f"eager {eager:.2f} ms, regions {regions:.2f}, small {small:.2f}"
        print(f"{name}: {shown}: {kept:.2f} of the gain")


if __name__ == "__main__":
    main()
