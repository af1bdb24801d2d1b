"""Measures the cost of a cycle (`CycleCost`) with the decoding code, once per machine and pair of models.

Steps are timed in interleaved rounds. Other work on the machine only adds time, so a step's cost is the lower
quartile over rounds. The cost is kept in the user's cache folder. A trial of a quarter of a second, at most every ten
minutes, adapts it to small changes of the machine, and decides whether it is no longer valid and measured again.
"""

import hashlib
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from treespec.draft.auto.bench import BATCH_NODES, MIN_ROUNDS, Act, Bench, Step, time_steps
from treespec.draft.auto.cost import CONTEXT_TOKENS, COST_FORMAT, CostBy, CycleCost, read_cost
from treespec.draft.drafter import Proposer
from treespec.errors import InputError
from treespec.files.atomic import remove_leftovers, write_json
from treespec.files.downloads import cache_folder
from treespec.kernels.library import name_library
from treespec.kernels.processor import describe_processor
from treespec.model.target import Target
from treespec.trees.static import build_chain

MEASURED_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DRAFTED_TEXTS = 4  # sequences whose drafts show the cost of each further one
# Further tokens of a longer text, and nodes of the larger tree, whose forwards show the cost of context.
LONGER_BY_TOKENS = 2048
CONTEXT_NODES = 8
MAX_MEASURED_LEVELS = 5
# Sizes are measured up to the first whose forward takes this many one-token forwards.
MAX_FORWARD_RATIO = 6
# Measure again if T(CHECKED_NODES) / T(1) has changed by more than this factor since the cost was measured.
CHECKED_NODES = 16
MAX_COST_DRIFT = 1.4
CHECK_TRIALS = 2
# Measure again if that ratio of the cost itself is another one than the trial's right after it, by this factor: other
# work has disturbed some steps. The factor was 0.9 to 1.13 in fourteen costs, and 2 in one that was disturbed.
MAX_MISFIT = 1.5
TRUSTED_SECONDS = 600  # after a check: so long other processes do not check the cost again

CHECKED_FILES = set[Path]()  # files whose cost this process has measured or found valid


def measure_costs(
    target: Target, proposer: Proposer | None, given: CycleCost | CostBy | None = None
) -> CostBy:
    """Returns the cost by batch size; its first call measures it.

    proposer: None: measure only the target. given: a known cost, for all batch sizes or by batch size.
    """
    if isinstance(given, CycleCost):
        return lambda batch: given
    if given is not None:
        return given
    cost_of_one = lru_cache(None)(partial(load_or_measure_cost, target, proposer))
    return lru_cache(None)(lambda batch: cost_of_one().select_batch_size(batch))


def load_or_measure_cost(
    target: Target, proposer: Proposer | None, folder: Path | None = None
) -> CycleCost:
    """Returns the cost from the cache folder if it is still valid, else measures it, which takes a few seconds."""
    file = name_cost_file(target, proposer, folder)
    stored_cost = read_cost(file)
    if stored_cost:
        if file in CHECKED_FILES or has_been_checked_lately(file):
            return stored_cost
        adapted_cost = adapt_cost(target, stored_cost)
        if adapted_cost:
            keep_cost(adapted_cost, file)
            return adapted_cost
    cost = measure_undisturbed_costs(target, proposer)
    if keep_cost(cost, file):
        os.utime(file, (0, 0))  # the next process checks it
    return cost


def measure_undisturbed_costs(target: Target, proposer: Proposer | None) -> CycleCost:
    """Measures the cost and its check ratio; if they do not fit together, once more."""
    for _ in range(CHECK_TRIALS):
        cost = measure_model_costs(target, proposer)
        cost = replace(cost, check_ratio=measure_check_ratio(target, cost))
        misfit = divide_checked_forwards(cost) / cost.check_ratio
        if abs(math.log(misfit)) < math.log(MAX_MISFIT):
            break
    return cost


def divide_checked_forwards(cost: CycleCost) -> float:
    """Returns T(n) / T(1) of a cost, for the nodes n of `measure_check_ratio`."""
    checked = cost.nodes.index(min(CHECKED_NODES, cost.nodes[-1]))
    return cost.forward[checked] / cost.forward[0]


def find_known_cost(target: Target, proposer: Proposer | None) -> CycleCost | None:
    """Returns the cost that this machine has measured before, unchecked; None without one. It runs no model."""
    return read_cost(name_cost_file(target, proposer))


def name_cost_file(target: Target, proposer: Proposer | None, folder: Path | None = None) -> Path:
    """Returns the file of a cost, whether it is there or not. folder: default: the cache folder."""
    about = json.dumps(list_dependencies(target, proposer), default=str).encode()
    if folder is None:
        folder = cache_folder()
    return folder / f"times-{hashlib.sha256(about).hexdigest()[:16]}.json"


def keep_cost(cost: CycleCost, file: Path) -> bool:
    """Writes a cost that this process has measured or checked; returns whether the file could be written."""
    CHECKED_FILES.add(file)
    try:
        remove_leftovers(file.parent)
        write_json(file, {"format": COST_FORMAT, "cost": asdict(cost)})
    except InputError:  # a folder that cannot be written: each process measures or checks it
        return False
    return True


def has_been_checked_lately(file: Path) -> bool:
    """Whether a process found a file's cost valid in the last `TRUSTED_SECONDS`: then it set the file's time."""
    age = time.time() - file.stat().st_mtime
    return 0 <= age < TRUSTED_SECONDS


def adapt_cost(target: Target, cost: CycleCost) -> CycleCost | None:
    """Returns a stored cost, bent to the ratio T(n) / T(1) of a trial; None: the ratio has changed too much.

    Memory bandwidth and clock of a shared machine change from hour to hour, and trees are chosen by this ratio. Other
    work disturbs a trial too, so only a second one decides that the cost is no longer valid.
    """
    if not cost.check_ratio:
        return None
    for _ in range(CHECK_TRIALS):
        ratio = measure_check_ratio(target, cost)
        if abs(math.log(ratio / cost.check_ratio)) < math.log(MAX_COST_DRIFT):
            return cost.scale_forward(ratio)
    return None


@torch.inference_mode()
def measure_check_ratio(target: Target, cost: CycleCost) -> float:
    """Measures T(n) / T(1), of `CHECKED_NODES` nodes or the most that the cost holds.

    The ratio of the cost itself is no standard: its forwards ran after drafts, with other contents of the
    processor's caches.
    """
    bench = Bench(target, None, CONTEXT_TOKENS)
    steps = []
    for nodes in (1, min(CHECKED_NODES, cost.nodes[-1])):
        steps.append(Step(None, partial(bench.forward, bench.build_branch(nodes))))
    one_node, many_nodes = time_steps(steps, target.output_device, MIN_ROUNDS)
    return many_nodes / one_node


def list_dependencies(target: Target, proposer: Proposer | None) -> list[object]:
    """Lists all that the cost depends on, in JSON's types."""
    device = target.output_device
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    identity = None
    if proposer:
        identity = proposer.identity
    return [
        describe_processor(),
        torch.get_num_threads(),
        torch.__version__,
        name_library(),
        str(device),
        name,
        str(target.dtype),
        [target.layers, target.config.to_json_string(), identity],
    ]


@torch.inference_mode()
def measure_model_costs(
    target: Target, proposer: Proposer | None, context: int = CONTEXT_TOKENS
) -> CycleCost:
    """Measures the cost of a cycle.

    proposer: None: the cost of drafts is 0. context: tokens before the tree.
    """
    bench = Bench(target, proposer, context)
    steps = dict[str, Step]()
    device = target.output_device
    levels = MAX_MEASURED_LEVELS
    if proposer and proposer.max_depth:
        levels = min(MAX_MEASURED_LEVELS, proposer.max_depth)
    small_forward: Act = partial(bench.forward, bench.build_branch(4))

    # 1. Drafts: chains of one level and of several. Decoding drafts before the forward over a tree.
    before_tree = small_forward
    if proposer:
        one_level = partial(bench.draft, build_chain(1))
        all_levels = partial(bench.draft, build_chain(levels))
        steps["level"] = Step(small_forward, one_level)
        steps["levels"] = Step(small_forward, all_levels)
        before_tree = all_levels
        if device.type == "cpu":
            batch = Bench(target, proposer, context, DRAFTED_TEXTS)
            steps["texts' level"] = Step(small_forward, partial(batch.draft, build_chain(1)))
            steps["texts' levels"] = Step(small_forward, partial(batch.draft, build_chain(levels)))

    # 2. Forwards over growing numbers of nodes, up to the first that takes too long.
    sizes = list(MEASURED_NODES)
    if context + BATCH_NODES <= target.context_length:
        sizes.append(BATCH_NODES)
    nodes = list[int]()
    first = list[float]()
    for size in sizes:
        forward = partial(bench.forward, bench.build_branch(size))
        before = before_tree
        if size == 1:
            before = small_forward
        steps[str(size)] = Step(before, forward)
        nodes.append(size)
        first += time_steps([Step(forward, forward)], device, rounds=2)
        if len(nodes) > 3 and first[-1] > MAX_FORWARD_RATIO * first[0]:
            break

    # 3. The ends of cycles: of one token, and of a tree.
    steps["plain"] = bench.end(bench.build_branch(1), [0])
    steps["tree"] = bench.end(bench.build_branch(6), [0, 2, 5])

    # 4. Time them all.
    times = time_steps(list(steps.values()), device)
    seconds = defaultdict(float, zip(steps, times, strict=True))  # 0 for drafts without a proposer
    level, begin = split_draft_seconds(seconds["level"], seconds["levels"], levels)
    text_level = None
    text_begin = None
    if "texts' level" in steps:
        of_texts = (seconds["texts' level"], seconds["texts' levels"])
        texts_level, texts_begin = split_draft_seconds(*of_texts, levels)
        text_level = max(texts_level - level, 0.0) / (DRAFTED_TEXTS - 1)
        text_begin = max(texts_begin - begin, 0.0) / (DRAFTED_TEXTS - 1)
    overhead = max(seconds["tree"] - seconds["plain"], 0.0)
    forward_seconds = tuple(seconds[str(size)] + seconds["plain"] for size in nodes)
    per_token, per_token_and_node = measure_context(target)
    return CycleCost(
        nodes=tuple(nodes),
        forward=forward_seconds,
        level=level,
        begin=begin,
        overhead=overhead,
        context=per_token,
        node_context=per_token_and_node,
        text_level=text_level,
        text_begin=text_begin,
    )


def split_draft_seconds(one_level: float, all_levels: float, levels: int) -> tuple[float, float]:
    """Returns the seconds of a draft level, and the extra ones of the first.

    one_level, all_levels: seconds of drafts of one level and of `levels`.
    """
    level = max(all_levels - one_level, 0.0) / max(levels - 1, 1)
    return level, max(one_level - level, 0.0)


@torch.inference_mode()
def measure_context(target: Target) -> tuple[float, float]:
    """Measures the seconds that each token of the text adds to a forward over one node, and for each further node.

    On an accelerator, and for a model that cannot take a longer text, both count as 0.
    """
    device = target.output_device
    longest = CONTEXT_TOKENS + LONGER_BY_TOKENS + BATCH_NODES
    if device.type != "cpu" or longest > target.context_length or target.tree_decoder.recurrent:
        return 0.0, 0.0
    steps = []
    for further in (0, LONGER_BY_TOKENS):
        bench = Bench(target, None, CONTEXT_TOKENS)
        bench.extend_text(further)
        for nodes in (1, CONTEXT_NODES):
            steps.append(Step(None, partial(bench.forward, bench.build_branch(nodes))))
    one_node, more_nodes, longer_one_node, longer_more_nodes = time_steps(steps, device, MIN_ROUNDS)
    per_token = max(longer_one_node - one_node, 0.0) / LONGER_BY_TOKENS
    all_nodes = max(longer_more_nodes - more_nodes, 0.0) / LONGER_BY_TOKENS
    return per_token, max(all_nodes - per_token, 0.0) / (CONTEXT_NODES - 1)
