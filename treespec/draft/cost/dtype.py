"""`--dtype auto` on a CPU: the checkpoint's dtype or float32, whichever the drafts are faster in.

Either holds the checkpoint's weights. A processor without bfloat16 instructions may take one token
sooner in bfloat16, whose weights are half as long to read, but a tree sooner in float32. So good
drafts pay in float32; without drafts, or with poor ones, bfloat16 is taken:

    nodes                         1      2      4      8     16
    tokens a cycle, expected      1   1.40   1.66   1.85   1.99   a drafter nothing is known of
    bfloat16                  50 ms     75    120    200    360   20, 19, 14, 9, 6 tokens/s
    float32                   60 ms     64     75     90    120   17, 22, 22, 21, 17     taken

    no drafts                     1      1      1      1      1   bfloat16: 20 beats 17
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PreTrainedConfig

from treespec.draft.calibration import COLDEST, Calibration, nearest
from treespec.draft.cost.model import Cost
from treespec.draft.cost.timing import kept_costs
from treespec.model.packed import multiplies_bfloat16
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.stand_in import ModelSize, forward_seconds, size_of
from treespec.model.weights import load_config

log = logging.getLogger(__name__)

NODES = (1, 2, 4, 8, 16)  # of the measured forwards
GUESS = (0.4, 0.1, 0.05)  # rates of a drafter that nothing is known of: a modest one
CLEARLY = 1.05  # times as fast as the checkpoint's own must another dtype be
LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # over accelerators, if there are any


def dtype_for(target: str, how: Placement = AS_IT_IS, rates: Sequence[float] = GUESS) -> str:
    """The dtype that `auto` is for a target: a name of torch's, or `auto` for the checkpoint's own.

    target: a directory or hub id. rates: how often the first, second, … likeliest draft at a node
    is accepted; () without drafts. Anywhere but on a CPU alone it is the checkpoint's own. Measures
    for a second or two, once for a processor and a model. Quantised weights are multiplied in
    float32 where the CPU has no fast bfloat16. Raises InputError.
    """
    if how.max_memory is not None or not only_cpu(how.device_map):
        return "auto"
    if how.load_in is not None:
        return "auto" if multiplies_bfloat16() else "float32"
    config = load_config(os.path.expanduser(target), how)
    own = checkpoint_dtype(config)
    if own not in ("bfloat16", "float16"):
        return "auto"  # float32 and wider: nothing is faster that holds their weights
    try:
        size = size_of(config, how.trust_remote_code)
        if not has_room(size.weights):
            return "auto"
        costs = costs_by_dtype(size, (own, "float32"))
    except Exception:  # a model's own code raises what it likes; loading says what is wrong
        return "auto"
    chosen = fastest(costs, own, rates)
    if chosen != own:
        log.warning("%s", reported(chosen, own, costs))
    return chosen


def only_cpu(device_map: Any) -> bool:
    """Whether accelerate places every weight on the CPU."""
    if isinstance(device_map, dict):
        return bool(device_map) and all(str(place) == "cpu" for place in device_map.values())
    if device_map is None or str(device_map) in SPREAD:
        return not torch.accelerator.is_available()
    return str(device_map) == "cpu"


def dtype_of_file(target: str, how: Placement = AS_IT_IS) -> str | None:
    """`checkpoint_dtype` of a directory, a hub id or `demo`. Raises InputError."""
    return checkpoint_dtype(load_config(os.path.expanduser(target), how))


def checkpoint_dtype(config: PreTrainedConfig) -> str | None:
    """What config.json says; None where it does not, or where the weights are quantised."""
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        return None
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return str(named).removeprefix("torch.") if named else None


def has_room(weights: int, limit: Path = LIMIT) -> bool:
    """Whether a number of weights in float32 takes at most half of the memory.

    limit: file with the container's limit in bytes, if it has one.
    """
    memory = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(limit.read_text()))
    return 4 * weights <= memory // 2


def costs_by_dtype(
    size: ModelSize, dtypes: Sequence[str], folder: Path | None = None
) -> dict[str, Cost]:
    """From the cache folder, or measured now. folder: default the user's cache."""

    def measured() -> dict[str, Cost]:
        found = forward_seconds(size, [getattr(torch, dtype) for dtype in dtypes], NODES)
        return {dtype: Cost(NODES, found[getattr(torch, dtype)]) for dtype in dtypes}

    about = [size.config.to_json_string(), sorted(dtypes)]
    return kept_costs("dtypes", dtypes, about, measured, folder)


def rates_of(calibrations: Sequence[Calibration | None]) -> tuple[float, ...]:
    """The rates at temperature 0 of the first source that has any; a guess where none has.

    calibrations: one a source of drafts. Returns () where there is no source.
    """
    known = (calibration.rates for calibration in calibrations if calibration)
    rates = next(filter(None, known), None)
    if rates:
        return nearest(rates, COLDEST)
    return GUESS if calibrations else ()


def fastest(costs: Mapping[str, Cost], own: str, rates: Sequence[float] = GUESS) -> str:
    """The dtype with the most tokens per second.

    own: the checkpoint's, which is kept unless another is clearly faster.
    """
    speeds = {dtype: speed(cost, rates) for dtype, cost in costs.items()}
    speeds[own] *= CLEARLY
    return max(speeds, key=lambda dtype: speeds[dtype])


def speed(cost: Cost, rates: Sequence[float] = GUESS) -> float:
    """Tokens per second of the best tree, or of one-token decoding. rates: () without drafts."""
    if not rates:
        return cost.plain
    _, best = cost.best(np.array([rates, rates]), NODES[-1], NODES[-1])
    return max(best, cost.plain)


def reported(chosen: str, own: str, costs: Mapping[str, Cost]) -> str:
    """The line about a dtype that is not the checkpoint's."""
    shown = {
        dtype: ", ".join(f"{1000 * spent:.0f}" for spent in costs[dtype].forward)
        for dtype in (chosen, own)
    }
    *most, last = map(str, NODES)
    return (
        f"the target runs in {chosen}, in which trees are faster on this CPU: its forward over "
        f"{', '.join(most)} and {last} nodes takes {shown[chosen]} ms, in the checkpoint's {own} "
        f"{shown[own]} ms; --dtype {own} keeps the checkpoint's"
    )
