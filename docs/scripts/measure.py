"""Measurements behind the tables of docs/: `python docs/scripts/measure.py COMMAND --help`.

The sides of a comparison take turns, and their first round is not counted: whatever else the machine does hits all
alike. A Markdown table of the medians follows a line about the machine.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from treespec import load
from treespec.draft.grow.builder import TreeBuilder
from treespec.eval.intervals import resample
from treespec.model.allocator import keep_freed_memory
from treespec.model.packed import pack
from treespec.model.processor import processor
from treespec.model.target import Target
from treespec.shaping.distribution import Distribution, TargetDistributions
from treespec.shaping.sampling import SamplingParams
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree, balanced, chain
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.registry import SCHEMES, verifier_by_name
from treespec.verify.scheme import Scheme

app = typer.Typer(help=__doc__, add_completion=False)
CPU = torch.device("cpu")


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
    found: dict[Any, list[float]] = {side: [] for side in sides}
    for _ in range(1 + rounds):
        for side, act in sides.items():
            found[side].append(act())
    return {side: statistics.median(times[1:]) for side, times in found.items()}


def show(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Print a line about the machine and the table."""
    columns = list(columns)
    print(f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(map(str, row))} |")


@app.command()
def long_context(target: str, head: str, length: int, max_new_tokens: int = 64) -> None:
    """Peak memory in MiB (Linux counts in KiB), prefill and the stages of a cycle after a long prompt."""

    # 1. Warm up with a short prompt: memory is counted from there.
    spec = load(target, head, "dynamic:depth=5,topk=6,nodes=24")
    prompt = [i * 7919 % spec.target.vocab_size for i in range(length)]
    spec.generate(prompt[:64], max_new_tokens=16)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    # 2. The long prompt.
    stats = spec.generate(prompt, max_new_tokens=max_new_tokens).stats
    stages = [stage for stage in stats.seconds if stage not in ("prefill", "total")]
    grown = getrusage(RUSAGE_SELF).ru_maxrss - before
    cells = [length, f"+{grown // 1024} MiB", f"{stats.seconds['prefill']:.1f} s"]
    cells += [f"{1e3 * stats.seconds[stage] / stats.cycles:.2f}" for stage in stages]
    show(["prompt", "peak", "prefill", *(f"{stage}, ms a cycle" for stage in stages)], [cells])


@app.command()
def paired(one: Path, other: Path) -> None:
    """By how much the acceptance length of one answers file of `treespec eval` exceeds another's.

    Both hold the same questions, which are resampled together, so that their difficulty cancels.
    The brackets hold a 95 % bootstrap interval.
    """
    counts = []  # of each file [questions, 2]: new tokens and cycles
    for file in (one, other):
        answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        answers.sort(key=lambda answer: answer["question_id"])
        first = [answer["choices"][0] for answer in answers]
        totals = [[sum(c[name]) for name in ("new_tokens", "decoding_steps")] for c in first]
        counts.append(np.array(totals))
    draws = resample(len(counts[0]), 1000, seed=0)
    (ours, our_cycles), (theirs, their_cycles) = ((draws @ own).T for own in counts)
    gain, *gains = ours / our_cycles / (theirs / their_cycles) - 1
    low, high = np.percentile(gains, [2.5, 97.5])
    print(f"{gain:+.0%} ({low:+.0%} to {high:+.0%})")


def forward_ms(target: Target, tree: TokenTree, context: int, commit: bool = False) -> float:
    """Of a forward over the tree after `context` tokens; commit: of its deepest path's commit too."""
    cache = target.new_cache(2 * context)
    target.prefill(cache, torch.arange(context)[None] % target.vocab_size)
    path = tree.ancestors[int(tree.depth.argmax())].nonzero().flatten().tolist()

    def act() -> None:
        target.forward_tree(cache, tree)
        if commit:
            cache.commit([path])

    return milliseconds(act)


def tree_of(shape: StaticTree | None) -> TokenTree:
    """A tree of arbitrary tokens. None: the root alone."""
    if shape is None:
        return root_only(torch.zeros(1, dtype=torch.int64))
    fixed = layout(shape, CPU)
    return TokenTree(torch.arange(shape.size), fixed.parents, fixed.depth, fixed.ancestors)


@app.command()
def forwards(
    target: str,
    forms: str = "float32,bfloat16",
    nodes: str = "1,4,8,16",
    context: int = 192,
    rounds: int = 7,
) -> None:
    """The target's forward over a tree in each form, in ms, and the form's bytes.

    forms: dtypes, each measured with plain and with packed weights, and values of `--load-in`.
    """
    # 1. Every form is in memory at once.
    targets: dict[tuple[str, str], Target] = {}
    for form in forms.split(","):
        if form in ("float32", "bfloat16", "float16"):
            targets[form, "plain"] = Target.load(target, dtype=form)
            targets[form, "packed"] = Target.load(target, dtype=form)
            pack(targets[form, "packed"].model)
        else:
            targets[form, "as loaded"] = load(target, load_in=form).target

    # 2. Trees of four branches.
    counts = [int(word) for word in nodes.split(",")]
    paths = {n: tuple((i % 4, *[0] * (i // 4)) for i in range(n - 1)) for n in counts}
    trees = {n: tree_of(StaticTree(paths[n]) if n > 1 else None) for n in counts}
    sides = itertools.product(targets, counts)
    times = medians(
        {(form, n): partial(forward_ms, targets[form], trees[n], context) for form, n in sides},
        rounds,
    )
    rows = []
    for form, model in targets.items():
        size = f"{weight_bytes(model.model) / 1e6:.0f}"
        rows.append([*form, size, *(f"{times[form, n]:.1f}" for n in counts)])
    show(["form", "weights", "MB", *counts], rows)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights, each stored tensor once."""

    def parts(weight: Tensor) -> list[Tensor]:  # the plain tensors inside a quantizer's class
        if flatten := getattr(weight, "__tensor_flatten__", None):
            return [part for name in flatten()[0] for part in parts(getattr(weight, name))]
        return [weight]

    stored = {}
    for part in (part for weight in model.parameters() for part in parts(weight)):
        storage = id(part) if part.is_mkldnn else part.untyped_storage().data_ptr()
        stored[storage] = part.numel() * part.element_size()
    return sum(stored.values())


SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_next": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "num_experts": 0,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 6),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 12, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
}
SHAPES = {
    "one token": None,
    "chain of 2": chain(2),
    "chain of 4": chain(4),
    "2 x 2": balanced(2, 2),
    "2 x 3": balanced(2, 3),
}


@app.command()
def recurrent(kinds: str = ",".join(KINDS), context: int = 128, rounds: int = 20) -> None:
    """What a forward over drafts and its commit cost on targets with recurrent layers, beside a token.

    The models have random weights: the ratio is the number of tokens a cycle from which drafting pays.
    """
    rows = []
    for kind in kinds.split(","):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES | KINDS[kind])
        target = Target(AutoModelForCausalLM.from_config(config).eval())
        sides = {
            name: partial(forward_ms, target, tree_of(shape), context, commit=True)
            for name, shape in SHAPES.items()
        }
        one, *others = medians(sides, rounds).values()
        rows.append([kind, f"{one:.1f}", *(f"{other:.1f} ({other / one:.2f})" for other in others)])
    show(["ms (ratio)", *SHAPES], rows)


@app.command()
def verify(
    verifiers: str = "rrs,rrs-wo,kseq,greedy,optimal,traversal,layer:greedy", vocabulary: int = 151_936,
    rounds: int = 15,
) -> None:  # fmt: skip
    """One verification of a tree of 65 nodes, in ms: node by node as on a CPU, all at once as on a GPU."""
    generator = torch.Generator().manual_seed(0)
    leaves = itertools.product(range(4), range(3), range(4))
    shape = StaticTree(tuple(dict.fromkeys(leaf[:n] for leaf in leaves for n in (1, 2, 3))))
    logits = 4 * torch.randn(shape.size, vocabulary, generator=generator)  # [N, V]
    laws, rows = TargetDistributions(logits, Distribution(SamplingParams(1.0))), []
    for name in verifiers.split(","):
        verifier: Any = verifier_by_name(name)
        tree = drafted(verifier.scheme, shape, logits, generator)
        ways = [verifier, verifier.at_once] if name in SCHEMES else [verifier]
        sides = {way: partial(milliseconds, partial(way, tree, laws, generator)) for way in ways}
        times = [f"{ms:.1f}" for ms in medians(sides, rounds).values()]
        rows.append([f"`{name}`", *times, *[""] * (2 - len(ways))])
    show(["", "step by step", "at once"], rows)


def drafted(
    scheme: Scheme, shape: StaticTree, logits: Tensor, generator: torch.Generator
) -> TokenTree:
    """A tree of draws whose draft logits are the target's with noise. logits: [N, V]."""
    draft_logits = logits + torch.randn(logits.shape, generator=generator)
    root, params = torch.zeros(1, dtype=torch.int64), SamplingParams(1.0)
    growth = TreeBuilder(shape, scheme).grow(root, draft_logits[:1], params, generator)
    below = iter(layout(shape, CPU).levels[1:])
    try:
        next(growth)
        while True:
            growth.send(draft_logits[next(below).nodes])
    except StopIteration as grown:
        return grown.value


if __name__ == "__main__":
    app()
