"""How long each verifier takes for one tree over a large vocabulary.

On a CPU the walk goes node by node; on a GPU it takes all nodes at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from treespec.draft.grow.static import stack, table
from treespec.model.allocator import keep_freed_memory
from treespec.shaping.sampling import SamplingParams, TargetLaws
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.registry import verifier_by_name
from treespec.verify.scheme import Scheme

VERIFIERS = ("rrs", "rrs-wo", "kseq", "greedy", "optimal", "traversal", "layer:greedy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    paths = [
        (a, b, c)[:depth]
        for a in range(4)
        for b in range(3)
        for c in range(4)
        for depth in (1, 2, 3)
    ]
    shape = StaticTree(tuple(paths))
    print(f"{shape.size} nodes, ms a verification: node by node, all at once")
    with torch.inference_mode():
        for name in VERIFIERS:
            verifier = verifier_by_name(name)
            tree, laws = grown(verifier.scheme, shape, options.vocabulary, generator)
            shown = [milliseconds(partial(verifier, tree, laws, generator), options.rounds)]
            if hasattr(verifier, "at_once"):
                at_once = partial(verifier.at_once, tree, laws, generator)
                shown.append(milliseconds(at_once, options.rounds))
            print(f"| `{name}` | {' | '.join(shown)} |", flush=True)


def grown(
    scheme: Scheme, shape: StaticTree, vocabulary: int, generator: torch.Generator
) -> tuple[TokenTree, TargetLaws]:
    """A tree whose draft laws are near the target's, and the target's laws at its nodes."""
    fixed = layout(shape, torch.device("cpu"))
    logits = 4 * torch.randn(shape.size, vocabulary, generator=generator)  # [N, V]
    tokens: list[Tensor] = [torch.zeros(1, dtype=torch.int64)]
    laws, draws, nodes = [], [], []
    for level in fixed.levels:
        noise = torch.randn(len(level.nodes), vocabulary, generator=generator)
        q = (logits[level.nodes] + noise).softmax(-1)
        drawn = scheme.draw(q, level.draws, generator)
        tokens.append(drawn.tokens[level.rows, level.columns])
        laws.append(q)
        draws.append(drawn)
        nodes.append(level.nodes)
    drafts = Drafts(torch.cat(nodes), table(laws), stack(draws))
    tree = TokenTree(torch.cat(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)
    return tree, TargetLaws(logits, SamplingParams(1.0))


def milliseconds(step: Callable[[], object], rounds: int) -> str:
    """The median of `rounds` runs."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return f"{statistics.median(times):.1f}"


if __name__ == "__main__":
    main()
