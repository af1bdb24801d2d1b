"""The target's forward over a tree in each dtype, with plain and with packed weights, in ms.

Every variant is in memory at once, and they take turns: what else the machine does hits all alike.
"""

import argparse
import statistics
import time
from collections import defaultdict

import torch

from treespec.draft.fit.ends import branch
from treespec.draft.fit.measure import CONTEXT
from treespec.model.packed import pack
from treespec.model.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    # 1. The target in every dtype, plain and packed.
    variants: dict[tuple[str, str], Target] = {}
    for dtype in options.dtypes:
        variants[dtype, "plain"] = Target.load(options.target, dtype=dtype)
        variants[dtype, "packed"] = Target.load(options.target, dtype=dtype)
        pack(variants[dtype, "packed"].model)

    # 2. The median of each forward.
    times = forward_times(variants, options.nodes, options.rounds)
    print("| dtype | weights |", *(f"{nodes} |" for nodes in options.nodes))
    print("|" + "---|" * (2 + len(options.nodes)))
    for name, own in times.items():
        medians = " | ".join(f"{statistics.median(own[nodes]):.1f}" for nodes in options.nodes)
        print(f"| {' | '.join(name)} | {medians} |")


@torch.inference_mode()
def forward_times(
    variants: dict[tuple[str, str], Target], nodes: list[int], rounds: int
) -> dict[tuple[str, str], dict[int, list[float]]]:
    """Milliseconds of each round, by variant and number of nodes."""
    tokens = torch.arange(CONTEXT)
    caches = {name: target.new_cache() for name, target in variants.items()}
    for name, target in variants.items():
        target.prefill(caches[name], tokens[None] % target.vocab_size)
    times: dict[tuple[str, str], dict[int, list[float]]] = {
        name: defaultdict(list) for name in variants
    }
    for number in range(-1, rounds):  # the first round warms up
        for count in nodes:
            for name, target in variants.items():
                started = time.perf_counter()
                target.forward_tree(caches[name], branch(count, tokens % target.vocab_size))
                if number >= 0:
                    times[name][count].append(1e3 * (time.perf_counter() - started))
    return times


if __name__ == "__main__":
    main()
