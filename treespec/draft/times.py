"""What a forward over a tree and a step of the head cost, measured once a device and model and kept in a file."""

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from treespec.draft.grow_dynamic import grow_dynamic
from treespec.draft.grow_static import grow_static
from treespec.draft.growth import grow_together
from treespec.draft.proposer import Proposer
from treespec.errors import InputError
from treespec.files import read_json, remove_leftovers, write_json
from treespec.sampling import SamplingParams
from treespec.target import Target
from treespec.trees.dynamic import DynamicTree
from treespec.trees.mask import ancestor_mask
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree
from treespec.verify.rrs_wo import RRSWithoutReplacement

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXT, WAITING = 192, 3  # tokens before the tree, and those that a cycle has committed
DEEP = 5  # levels, at most
ROUNDS = 7


@dataclass(frozen=True)
class Times:
    """Seconds. target: of the forward over as many nodes as `nodes` says. begin: of the first level of drafts.

    step: of every further level. drawn: both where several tokens a node are drawn. single: both where one is.
    """

    nodes: tuple[int, ...]
    target: tuple[float, ...]
    begin: float
    step: float
    drawn: tuple[float, float]
    single: tuple[float, float]

    def drafting(self, levels: int, draws: int) -> float:
        """Seconds of so many levels of drafts. draws: at a node at most, 0 where the likeliest tokens are taken."""
        begin, step = (self.begin, self.step) if not draws else self.single if draws == 1 else self.drawn
        return begin + step * max(levels - 1, 0)

    def forward(self, most: int) -> np.ndarray:
        """[most] seconds of the target's forward over 1, 2, … nodes: no less for more, straight lines between."""
        known, at, n = np.maximum.accumulate(self.target), np.array(self.nodes), np.arange(1, most + 1)
        right = np.searchsorted(at, n).clip(1, len(at) - 1)
        slope = (known[right] - known[right - 1]) / (at[right] - at[right - 1])
        return known[right - 1] + slope * (n - at[right - 1])


def times_for(target: Target, proposer: Proposer, folder: Path | None = None) -> Times:
    """Kept times, or new ones (a few seconds). folder: None is treespec's in the user's cache."""
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec"
    file = folder / f"times-{key(target, proposer)}.json"
    if (kept := kept_times(file)) is not None:
        return kept
    times = measure(target, proposer)
    with suppress(InputError):  # a cache that cannot be written is measured again
        remove_leftovers(folder)
        write_json(file, asdict(times))
    return times


def kept_times(file: Path) -> Times | None:
    """What an earlier run measured; None for a file that is missing, damaged or not understood."""
    try:
        fields = read_json(file, "it is measured again")
        if fields["nodes"] != list(NODES):
            return None  # of an older version
        return Times(
            nodes=NODES,
            target=seconds(fields["target"], len(NODES)),
            begin=seconds([fields["begin"]], 1)[0],
            step=seconds([fields["step"]], 1)[0],
            drawn=cast(tuple[float, float], seconds(fields["drawn"], 2)),
            single=cast(tuple[float, float], seconds(fields["single"], 2)),
        )
    except (InputError, LookupError, TypeError, ValueError):
        return None


def seconds(values: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` finite times that are not negative. Raises ValueError for anything else."""
    found = tuple(map(float, values))
    if len(found) != count or not all(0 <= value < math.inf for value in found):
        raise ValueError("no such times")
    return found


def key(target: Target, proposer: Proposer) -> str:
    """What the times depend on, in short."""
    device = target.output_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {os.cpu_count()}"
    model = target.config.to_json_string()
    parts = [name, torch.get_num_threads(), str(target.dtype), torch.__version__]
    parts += [target.layers, model, proposer.identity, target.compiled is not None]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


@torch.inference_mode()
def measure(target: Target, proposer: Proposer) -> Times:
    """Medians of interleaved rounds."""
    tokens = torch.arange(CONTEXT, device=target.output_device) % target.vocab_size  # more than some contexts hold
    cache = target.new_cache()
    proposer = proposer.new()
    features = target.prefill(cache, tokens[None], proposer.taps)[0]
    proposer.observe([features[:-1]], [tokens])

    def drafts(draws: int, depth: int) -> None:
        proposer.rewind([CONTEXT - 1 - WAITING])
        proposer.observe([features[-1 - WAITING : -1]], [tokens[-1 - WAITING :]])
        (logits,) = proposer.begin(tokens[-1:], cache)
        assert logits is not None
        if draws:
            tree = StaticTree(tuple((0,) * level + (rank,) for level in range(depth) for rank in range(draws)))
            growth = grow_static(tokens[-1:], logits, tree, RRSWithoutReplacement(), SamplingParams(1.0), generator)
        else:
            growth = grow_dynamic(tokens[-1:], logits, DynamicTree(depth))
        grow_together(proposer, [growth])

    generator = torch.Generator(device=target.output_device).manual_seed(0)
    most = min(DEEP, proposer.max_depth or DEEP)
    forwards = [partial(target.forward_tree, cache, path(n, tokens)) for n in NODES]
    levels = [partial(drafts, draws, depth) for draws in (0, 2, 1) for depth in (1, most)]
    found = medians([*forwards, *levels], target.output_device)
    costs = found[len(NODES) :]
    likely, drawn, single = (
        (first, max(deep - first, 0) / max(most - 1, 1)) for first, deep in zip(costs[::2], costs[1::2], strict=True)
    )
    return Times(NODES, tuple(found[: len(NODES)]), *likely, drawn, single)


def path(nodes: int, tokens: Tensor) -> TokenTree:
    """A tree of one branch; its shape does not matter to the time."""
    number = torch.arange(nodes, device=tokens.device)
    return TokenTree(tokens[:nodes], number - 1, number, ancestor_mask(number - 1, nodes))


def medians(steps: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each step, interleaved over rounds, the first for warming up."""
    seen: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS + 1):
        for step, own in zip(steps, seen, strict=True):
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            own.append(time.perf_counter() - started)
    return [statistics.median(own[1:]) for own in seen]
