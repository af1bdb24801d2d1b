"""How long a target's forward takes with and without `--compile`, and when either is ready."""

import argparse
import statistics
import time
from collections import defaultdict

import torch

from treespec import Spec, load
from treespec.draft.fit.measure import path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[192, 1000], help="tokens before the tree"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    specs = {name: ready(options.target, options.head, name) for name in ("default", "compiled")}
    for context in options.contexts:
        for (nodes, name), median in forward_times(
            specs, context, options.nodes, options.rounds
        ).items():
            print(f"context {context}, {nodes} nodes, {name}: {median:.1f} ms")


def ready(target: str, head: str, name: str) -> Spec:
    """A loaded and warmed-up pair; prints how long that took."""
    started = time.perf_counter()
    spec = load(target, head, compile=name == "compiled")
    spec.warm_up()
    print(f"{name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return spec


@torch.inference_mode()
def forward_times(
    specs: dict[str, Spec], context: int, sizes: list[int], rounds: int
) -> dict[tuple[int, str], float]:
    """(nodes, name) -> median ms of a forward behind `context` tokens; the specs take turns."""
    tokens = torch.arange(context)[None]
    caches = {name: spec.target.new_cache() for name, spec in specs.items()}
    for name, spec in specs.items():
        spec.target.prefill(caches[name], tokens)
    times = defaultdict(list)
    for _ in range(1 + rounds):
        for nodes in sizes:
            for name, spec in specs.items():
                started = time.perf_counter()
                spec.target.forward_tree(caches[name], path(nodes, tokens[0]))
                times[nodes, name].append(1e3 * (time.perf_counter() - started))
    return {case: statistics.median(own[1:]) for case, own in times.items()}


if __name__ == "__main__":
    main()
