"""Measure what a cycle costs (`Cost`) with the decoding code itself: once for a machine and a pair of models.

Steps are timed in interleaved rounds. Other work on the machine only adds time, so a step's cost is
the lower quartile over rounds. The cost is kept in the user's cache, and measured again where it no longer holds.
"""

import hashlib
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from treespec.draft.auto.cost import FORMAT, Cost, CostBy, cost_in
from treespec.draft.builders import Ranked
from treespec.draft.drafter import GrowthKey, Proposer
from treespec.draft.tree_assembly import grow_together
from treespec.errors import InputError
from treespec.files.atomic import remove_leftovers, write_json
from treespec.files.downloads import cache_folder
from treespec.kernels import ops as kernels
from treespec.kernels.processor import processor
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Distribution
from treespec.trees.mask import ancestor_mask
from treespec.trees.static import StaticTree, chain
from treespec.trees.tree import TokenTree, sent
from treespec.verify.gumbel import AUTO
from treespec.verify.walk import judge_all

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MANY = 256  # nodes of a batch; measured where the context has room for them
# tokens before the tree, and tokens that the last cycle committed
CONTEXT = 192
WAITING = 3
DEEP = 5  # levels, at most
DEAR = 6  # one-token forwards: measure no tree larger than the first that costs this much
# Nodes whose time over one node's may differ by this factor from a kept cost.
SOME = 16
DRIFT = 1.25
# rounds; after SECONDS they stop, but not before FEWEST
ROUNDS = 12
FEWEST = 4
SECONDS = 10.0

TRUSTED = set[Path]()  # files whose cost was measured, or found to hold, by this process

Act = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """What is timed, and what runs before it, as in decoding: it warms the caches."""

    before: Act
    timed: Act


def measured_costs(
    target: Target, proposer: Proposer | None, given: Cost | CostBy | None = None
) -> CostBy:
    """The cost by batch size; measured when first asked for.

    proposer: None measures the target alone. given: take these, whatever the batch.
    """
    if isinstance(given, Cost):
        return lambda batch: given
    if given is not None:
        return given
    cost_of_one = lru_cache(None)(partial(cost_for, target, proposer))
    return lru_cache(None)(lambda batch: cost_of_one().among(batch))


def cost_for(target: Target, proposer: Proposer | None, folder: Path | None = None) -> Cost:
    """The cost from the cache folder, if it still holds, or measured now, which takes a few seconds."""
    about = json.dumps(dependencies(target, proposer), default=str).encode()
    if folder is None:
        folder = cache_folder()
    file = folder / f"times-{hashlib.sha256(about).hexdigest()[:16]}.json"
    kept = cost_in(file)
    if kept and (file in TRUSTED or holds(target, kept)):
        TRUSTED.add(file)
        return kept
    cost = measure(target, proposer)
    TRUSTED.add(file)
    with suppress(InputError):  # a folder that cannot be written: the next run measures again
        remove_leftovers(file.parent)
        write_json(file, {"format": FORMAT, "cost": asdict(cost)})
    return cost


@torch.inference_mode()
def holds(target: Target, cost: Cost) -> bool:
    """Whether the price of some nodes over one is still what it was: trees are chosen by it.

    Memory and clock of a machine that others share change from hour to hour.
    """
    bench = Bench(target, None, CONTEXT)
    nodes = min(SOME, cost.nodes[-1])
    forward_one = partial(bench.forward, bench.branch(1))
    forward_more = partial(bench.forward, bench.branch(nodes))
    steps = [Step(forward_one, forward_one), Step(forward_more, forward_more)]
    one, more = fast_times(steps, target.output_device, FEWEST)
    kept = cost.line(nodes)
    return abs(math.log(more / one * kept[0] / kept[-1])) < math.log(DRIFT)


def dependencies(target: Target, proposer: Proposer | None) -> list[object]:
    """All that the cost depends on, in JSON's types."""
    device = target.output_device
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    identity = None
    if proposer:
        identity = proposer.identity
    return [
        processor(),
        torch.get_num_threads(),
        torch.__version__,
        kernels.name(),
        str(device),
        name,
        str(target.dtype),
        [target.layers, target.config.to_json_string(), identity],
    ]


@torch.inference_mode()
def measure(target: Target, proposer: Proposer | None, context: int = CONTEXT) -> Cost:
    """proposer: None leaves the drafts at 0. context: tokens before the tree."""
    bench = Bench(target, proposer, context)
    steps = dict[str, Step]()
    device = target.output_device
    levels = DEEP
    if proposer and proposer.max_depth:
        levels = min(DEEP, proposer.max_depth)
    small_forward: Act = partial(bench.forward, bench.branch(4))

    # 1. Drafts: chains of one level and of several. Decoding drafts before the forward over a tree.
    before_tree = small_forward
    if proposer:
        one_level = partial(bench.draft, chain(1))
        all_levels = partial(bench.draft, chain(levels))
        steps["level"] = Step(small_forward, one_level)
        steps["levels"] = Step(small_forward, all_levels)
        before_tree = all_levels

    # 2. Forwards over growing numbers of nodes, up to the first that is too dear.
    sizes = list(NODES)
    if context + MANY <= target.context_length:
        sizes.append(MANY)
    nodes = list[int]()
    first = list[float]()
    for size in sizes:
        forward = partial(bench.forward, bench.branch(size))
        before = before_tree
        if size == 1:
            before = small_forward
        steps[str(size)] = Step(before, forward)
        nodes.append(size)
        first += fast_times([Step(forward, forward)], device, rounds=2)
        if len(nodes) > 3 and first[-1] > DEAR * first[0]:
            break

    # 3. The ends of cycles: of one token, and of a tree.
    steps["plain"] = bench.end(bench.branch(1), [0])
    steps["tree"] = bench.end(bench.branch(6), [0, 2, 5])

    # 4. Time them all.
    times = fast_times(list(steps.values()), device)
    seconds = defaultdict(float, zip(steps, times, strict=True))  # 0 for drafts without a proposer
    level = max(seconds["levels"] - seconds["level"], 0.0) / max(levels - 1, 1)
    begin = max(seconds["level"] - level, 0.0)
    overhead = max(seconds["tree"] - seconds["plain"], 0.0)
    forward_seconds = tuple(seconds[str(size)] + seconds["plain"] for size in nodes)
    return Cost(tuple(nodes), forward_seconds, level, begin, overhead)


@final
class Bench:
    """A sequence in the target's cache, observed by the proposer, and the parts of its cycle."""

    def __init__(self, target: Target, proposer: Proposer | None, context: int) -> None:
        self.target = target
        aux_layers: tuple[int, ...] = ()
        if proposer:
            aux_layers = proposer.aux_layers
        # The context may exceed the target's context length.
        ids = torch.arange(context + MANY, device=target.output_device)
        self.ids = ids % target.vocab_size
        self.tokens = self.ids[:context].cpu()
        self.cache = target.new_cache(len(ids))
        self.features = target.prefill(self.cache, self.tokens[None], aux_layers)[0]
        if proposer:
            self.proposer = proposer.new()
            self.proposer.observe([self.features[:-1]], [self.tokens])

    def branch(self, nodes: int) -> TokenTree:
        """A tree of one branch; a forward's time does not depend on the shape."""
        number = torch.arange(nodes, device=self.ids.device)
        return TokenTree(self.ids[:nodes], number - 1, number, ancestor_mask(number - 1))

    def forward(self, tree: TokenTree) -> Tensor:
        return self.target.forward_trees(self.cache, [tree])[0].logits

    def draft(self, shape: StaticTree) -> None:
        """Draft a chain after observing a few new tokens, by a graph where decoding has one."""
        proposer = self.proposer
        depth = shape.max_depth
        ranked = Ranked(depth, topk=10, nodes=depth + 1, expanded=1)
        root = self.ids[:1]
        proposer.rewind([len(self.tokens) - 1 - WAITING])
        proposer.observe([self.features[-1 - WAITING : -1]], [self.tokens[-1 - WAITING :]])
        begun = [row for row in proposer.begin(self.tokens[-1:], self.cache) if row is not None]

        def grown(ends: Tensor, rows: Sequence[Tensor | None], _: Tensor | None) -> list[TokenTree]:
            ends = sent(ends, root.device)
            growths = [ranked.grow(ends, row) for row in rows if row is not None]
            return [tree for tree, _ in grow_together(proposer.extend, growths)]

        proposer.repeated(grown, self.tokens[-1:], begun, None, GrowthKey((shape,)))

    def end(self, tree: TokenTree, kept: list[int]) -> Step:
        """A tree is verified and the path `kept` committed."""
        logits = self.forward(tree)
        by = Distribution(SamplingParams())
        generator = torch.Generator(device=self.ids.device)

        def finish() -> None:
            judge_all(AUTO, [tree], [logits], [by], [generator])
            self.cache.commit([kept])
            self.cache.rewind([len(self.tokens)])

        return Step(partial(self.forward, tree), finish)


def fast_times(steps: Sequence[Step], device: torch.device, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each step, over interleaved rounds after one for warming up."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    seconds: list[list[float]] = [[] for _ in steps]
    measuring_since = time.perf_counter()
    for done in range(rounds + 1):
        if done > FEWEST and time.perf_counter() - measuring_since > SECONDS:
            break
        for step, step_seconds in zip(steps, seconds, strict=True):
            step.before()
            wait()
            started = time.perf_counter()
            step.timed()
            wait()
            step_seconds.append(time.perf_counter() - started)
    return [statistics.quantiles(times[1:], n=4, method="inclusive")[0] for times in seconds]
