"""What one node of `optimal` costs beside a softmax over the same rows, in ms on one thread."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from treespec.model.allocator import keep_freed_memory
from treespec.verify.coupling import scores
from treespec.verify.laws import scale, without
from treespec.verify.optimal import Optimal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=[151_936, 32_768], help="large ones first"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--draws", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| V | rows | K | softmax | draw | build | score | plan | build, ratio | plan, ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for vocabulary in options.vocabularies:
        for rows in options.rows:
            for draws in options.draws:
                print(node(vocabulary, rows, draws, options.rounds), flush=True)


@torch.inference_mode()
def node(vocabulary: int, rows: int, k: int, rounds: int) -> str:
    """A line of the table: `rows` nodes with k draws each."""
    # 1. Laws like a model's, and draws.
    scheme, generator = Optimal(), torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    q = logits.softmax(-1)
    p = (logits + torch.randn(rows, vocabulary, generator=generator)).softmax(-1)
    draws = scheme.draw(q, k, generator)
    # 2. What the plan hands to the coupling: the draws from the rest of q, without the sure tokens.
    place, coin = draws.uniforms.unbind(-1)
    drawn = (draws.tokens >= 0) & ~draws.sure
    number = drawn.sum(-1, keepdim=True)
    rest = without(q, draws.tokens.masked_fill(drawn, -1))
    rest *= scale(rest, number > 0)
    cell, coupling = scheme.couple(p, rest, number)
    cells = cell.gather(1, draws.tokens.clamp(min=0))
    # 3. Time the parts; build makes cells and coupling, score the scores, plan all of it.
    times = medians(
        (
            lambda: logits.softmax(-1),
            lambda: scheme.draw(q, k, generator),
            lambda: scheme.couple(p, rest, number),
            lambda: scores(coupling, cells, place, coin),
            lambda: scheme.plan(p, q, draws),
        ),
        rounds,
    )
    softmax, _, build, _, plan = times
    shown = " | ".join(f"{x:.3f}" for x in times)
    return (
        f"| {vocabulary} | {rows} | {k} | {shown} | {build / softmax:.0f} | {plan / softmax:.0f} |"
    )


def medians(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each step; the steps take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, own in zip(steps, times, strict=True):
            started = time.perf_counter()
            step()
            own.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    main()
