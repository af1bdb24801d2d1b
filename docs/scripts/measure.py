"""Measurements behind the tables of docs/: `python docs/scripts/measure.py COMMAND --help`.

The sides of a comparison take turns, and their first round is not counted: whatever else the machine does hits all
alike. A Markdown table of the medians follows a line about the machine.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
import typer
from torch import Tensor

from treespec import load
from treespec.draft.auto.measure import MEASURED_NODES, measure_model_costs
from treespec.draft.builders import TreeBuilder
from treespec.draft.lookup.guess import Guess
from treespec.kernels.allocator import keep_freed_memory
from treespec.kernels.processor import describe_processor
from treespec.model.cache import TreeCache
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler, TargetDistributions
from treespec.trees.layout import get_layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree
from treespec.verify.registry import load_verifier
from treespec.verify.scheme import Scheme
from treespec.verify.walk import run_all_or_raise

app = typer.Typer(help=__doc__, add_completion=False)
CPU = torch.device("cpu")
CONTEXT = 192  # tokens before a tree


@app.callback()
def prepare() -> None:
    torch.set_grad_enabled(False)
    keep_freed_memory()


def milliseconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - started)


def medians(sides: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """The median of what each side gives; the sides take turns, after a round that warms up."""
    found = {side: list[float]() for side in sides}
    for _ in range(1 + rounds):
        for side, act in sides.items():
            found[side].append(act())
    return {side: statistics.median(times[1:]) for side, times in found.items()}


def show(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Print a line about the machine and the table."""
    columns = list(columns)
    print(f"{describe_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(map(str, row))} |")


@app.command()
def costs(target: str, head: str, contexts: str) -> None:
    """The target's forward over n nodes and the head's draft levels, in ms, after each number of tokens."""
    spec, rows = load(target, head), []
    for context in map(int, contexts.split(",")):
        cost = measure_model_costs(spec.target, spec.proposer, context=context)
        seconds = [*cost.forward, cost.begin + cost.level, cost.level]
        rows.append([context, *(f"{1e3 * one:.2f}" for one in seconds)])
    show(["context", *MEASURED_NODES, "first draft level", "each further"], rows)


@cache
def prefilled(target: Target, context: int) -> TreeCache:
    committed = target.build_cache()
    target.prefill(committed, torch.arange(context)[None] % target.vocab_size)
    return committed


def forward_ms(target: Target, context: int, tree: TokenTree) -> float:
    """Of a forward over the tree, after one that warms up."""
    forward = partial(target.forward_tree, prefilled(target, context), tree)
    forward()
    return milliseconds(forward)


@app.command()
def forwards(
    target: str, forms: str = "float32,bfloat16", nodes: str = "1,4,8,16", rounds: int = 7,
    contexts: str = str(CONTEXT),
) -> None:  # fmt: skip
    """The target's forward over a tree in each form, in ms, after each number of tokens, and the form's bytes.

    forms: dtypes, each measured with plain and with packed weights and with fused layers, and values of `--load-in`.
    """
    # 1. Every form is in memory at once.
    targets: dict[tuple[str, str], Target] = {}
    for form in forms.split(","):
        if form in ("float32", "bfloat16", "float16"):
            for weights in ("plain", "packed"):
                targets[form, weights] = Target.load(target, dtype=form)
            pack(targets[form, "packed"].model)
            targets[form, "fused"] = Target.load(target, dtype=form)
            pack(targets[form, "fused"].model)
            fuse(targets[form, "fused"].model)
        else:
            targets[form, "as loaded"] = load(target, load_in=form).target

    # 2. Trees of four branches.
    trees = {}
    for n in map(int, nodes.split(",")):
        guess = Guess(range(1, n), [max(0, i - 4) for i in range(1, n)])
        trees[n] = guess.build_token_tree(0, torch.device("cpu"))
    sides = {
        (form, context, n): partial(forward_ms, targets[form], context, trees[n])
        for form, context, n in itertools.product(targets, map(int, contexts.split(",")), trees)
    }
    times, rows = medians(sides, rounds), []
    for form, context in dict.fromkeys(side[:2] for side in sides):
        size = f"{weight_bytes(targets[form].model) / 1e6:.0f}"
        milli = (f"{times[form, context, n]:.1f}" for n in trees)
        rows.append([*form, size, context, *milli])
    show(["form", "weights", "MB", "context", *trees], rows)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights, each tensor once."""

    def parts(weight: Tensor) -> list[Tensor]:  # the plain tensors inside a quantizer's class
        if flatten := getattr(weight, "__tensor_flatten__", None):
            return [part for name in flatten()[0] for part in parts(getattr(weight, name))]
        return [weight]

    plain = [part for weight in model.parameters() for part in parts(weight)]
    stored = {part.data_ptr(): part for part in plain}
    return sum(part.numel() * part.element_size() for part in stored.values())


@app.command()
def verify(
    verifiers: str = "rrs,rrs-wo,kseq,greedy,optimal,traversal", vocabulary: int = 151_936,
    rounds: int = 15,
) -> None:  # fmt: skip
    """One verification of a tree of 65 nodes, in ms: node by node as on a CPU, all at once as on a GPU."""
    generator = torch.Generator().manual_seed(0)
    leaves = itertools.product(range(4), range(3), range(4))
    shape = StaticTree(tuple(dict.fromkeys(leaf[:n] for leaf in leaves for n in (1, 2, 3))))
    logits = 4 * torch.randn(shape.size, vocabulary, generator=generator)  # [N, V]
    p, rows = TargetDistributions(logits, Sampler(SamplingParams(1.0))), []
    for name in verifiers.split(","):
        verifier: Any = load_verifier(name)
        tree = drafted(verifier.scheme, shape, logits, generator)
        together = partial(at_once, verifier)
        ways = verifier, together
        sides = {way: partial(milliseconds, partial(way, tree, p, generator)) for way in ways}
        rows.append([f"`{name}`", *(f"{ms:.1f}" for ms in medians(sides, rounds).values())])
    show(["", "step by step", "at once"], rows)


def at_once(verifier: Any, *tree_and_masses: Any) -> Any:
    return run_all_or_raise([verifier.verify_on_device(*tree_and_masses)])


def drafted(
    scheme: Scheme, shape: StaticTree, logits: Tensor, generator: torch.Generator
) -> TokenTree:
    """A tree of draws whose draft logits are the target's with noise. logits: [N, V]."""
    draft_logits = logits + torch.randn(logits.shape, generator=generator)
    root, params = torch.zeros(1, dtype=torch.int64), SamplingParams(1.0)
    growth = TreeBuilder(shape, scheme).grow(root, draft_logits[:1], params, generator)
    below = iter(get_layout(shape, CPU).levels[1:])
    try:
        next(growth)
        while True:
            growth.send(draft_logits[next(below).nodes])
    except StopIteration as grown:
        return grown.value


if __name__ == "__main__":
    app()
