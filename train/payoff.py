"""Whether a head's chain of drafts pays on this machine, by the measured costs of its cycles."""

from treespec.draft.auto.cost import CycleCost
from treespec.draft.auto.measure import load_or_measure_cost
from treespec.draft.heads.loading import build_proposer
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.train.record import Validation


def find_cost(head: Head, target: Target) -> CycleCost | None:
    """Find the cost of a cycle with a head: measured in seconds, once a machine, as decoding measures it.

    None if only the target's ends are loaded, which cannot decode.
    """
    if target.ends:
        return None
    return load_or_measure_cost(target, build_proposer(head, target))


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
