"""Whether a head's chain of drafts pays on this machine, by the measured costs of its cycles.

A run over stored features ends without its target's layers. So the cost is measured when they are loaded to store the
features, with an untrained head of the same shape, and lies beside the features.
"""

import hashlib
import json
from pathlib import Path

import torch

from treespec.draft.auto.cost import CycleCost, read_cost
from treespec.draft.auto.measure import keep_cost, load_or_measure_cost
from treespec.draft.heads.loading import build_proposer
from treespec.draft.vocabulary import restrict
from treespec.heads.head import Head
from treespec.kernels.processor import describe_processor
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.record import Validation
from treespec.train.start import build_untrained_head, count_draft_tokens


def find_cost(config: TrainConfig, head: Head, target: Target) -> CycleCost | None:
    """Find the cost of a cycle with a head: measured in seconds, once a machine, as decoding measures it.

    If only the target's ends are loaded, it is the one beside the stored features; None: there is none.

    Args:
        config: the run's options.
        head: the head as it will be served, with its draft vocabulary.
        target: the target, or its ends.
    """
    if not target.ends:
        return load_or_measure_cost(target, build_proposer(head, target))
    if config.features is None:
        return None
    return read_cost(name_stored_cost(config, head, target))


def keep_cost_beside_features(config: TrainConfig, target: Target) -> None:
    """Measure the cost of a cycle with an untrained head of a run's shape, and write it beside the stored features.

    Args:
        config: the run's options.
        target: the whole target.
    """
    with torch.random.fork_rng(devices=[]):
        head = build_untrained_head(config, target).to(target.dtype).eval()
    count = count_draft_tokens(config, target)
    if count:
        restrict(head, target, torch.arange(count, device="cpu"))
    file = name_stored_cost(config, head, target)
    if not file.exists():
        keep_cost(load_or_measure_cost(target, build_proposer(head, target)), file)


def name_stored_cost(config: TrainConfig, head: Head, target: Target) -> Path:
    """Name the file of a cost beside stored features, by the machine and the shapes of target and head."""
    device = target.output_device
    device_name = "cpu"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    draft_tokens = target.vocab_size
    if head.vocabulary is not None:
        draft_tokens = len(head.vocabulary)
    about = [
        describe_processor(),
        torch.get_num_threads(),
        torch.__version__,
        device_name,
        target.layers,
        target.config.hidden_size,
        target.vocab_size,
        str(target.dtype),
        head.kind,
        head.config,
        draft_tokens,
    ]
    digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]
    return Path(str(config.features)) / f"cost-{digest}.json"


def compute_chain_price(cost: CycleCost, depth: int) -> float:
    """Compute how many tokens a cycle with a chain of drafts must commit, so that it pays.

    cost: of a cycle. depth: the drafts of the chain. The forward is over them and the token before.
    """
    seconds = cost.interpolate_forward(depth + 1) + cost.overhead + cost.begin + depth * cost.level
    return float(seconds * cost.baseline_speed)


def describe_payoff(cost: CycleCost | None, result: Validation) -> str:
    """Say in a sentence whether the head's best chain pays on this machine, and from where on one does.

    Args:
        cost: of a cycle; None: unknown.
        result: the head's validation.

    Returns:
        The sentence; "" if the cost or the head's agreement is not known.
    """
    if cost is None or not result.positions:
        return ""
    # 1. The chain with the largest speed relative to one-token decoding.
    best_depth = 0
    best_speed = 0.0
    best_length = 1.0
    length = 1.0
    for depth, run in enumerate(result.runs, start=1):
        length += run
        speed = length / compute_chain_price(cost, depth)
        if speed > best_speed:
            best_depth = depth
            best_speed = speed
            best_length = length

    # 2. The sentence.
    price = compute_chain_price(cost, best_depth)
    chain = f"a chain of {best_depth} drafts commits {best_length:.2f} tokens per step"
    if best_speed < 1:
        return f"On this machine {chain} and does not pay: {price:.2f} does"
    return f"On this machine {chain} and pays: {price:.2f} is the least"
