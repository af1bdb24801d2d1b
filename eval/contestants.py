"""Who answers the questions of an evaluation, and when: one-token decoding, drafters, and peers.

It loads no torch, so that names that do not fit each other are refused at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import PurePath
from random import Random

from treespec.draft.drafters import DrafterSpec
from treespec.draft.pairing import check_named
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.eval.config import TRANSFORMERS, EvalConfig, drafters_of, numbers_of, peers_of
from treespec.eval.intervals import FEW
from treespec.eval.questions import Question
from treespec.trees.policy import policy
from treespec.verify.facts import known_verifier

BASELINE = "baseline"
GENERATE, ASSISTED = "generate", "assisted generation"
SERVED = "what it serves"  # the model of a server that `--peers` does not name
# transformers' methods: the arguments of `model.generate` that choose each
METHODS: dict[str, dict[str, int]] = {
    GENERATE: {},
    "prompt lookup 3": {"prompt_lookup_num_tokens": 3},
    "prompt lookup 10": {"prompt_lookup_num_tokens": 10},
    ASSISTED: {},
}


WAVES = 4  # batches in a group of questions: the next question takes the place of a finished one


@dataclass(frozen=True)
class Contestant:
    """One way to complete prompts.

    method: `baseline` is one-token decoding, others are a verifier as `--verifier` names it, one of
    `METHODS`, or a server's model. drafter: `kind:value`; None for the baseline and for peers. tree:
    None is the default of verifier or drafter. batch: completions at a time. peer: `transformers` or
    a server's address; None: treespec answers. again: the baseline a second time (A/A), whose speed
    over the first shows the clock's noise. labels: drafter, method, tree, temperature and batch, as
    tables have them; "" where all contestants have one. name: in the ledger, and of its file of
    completions.
    """

    method: str
    drafter: str | None = None
    tree: str | None = None
    temperature: float = 0.0
    batch: int = 1
    peer: str | None = None
    again: bool = False
    labels: tuple[str, ...] = ()
    name: str = ""

    @property
    def lossless(self) -> bool:
        """Whether its completions have the target's distribution; peers are taken to have it."""
        return self.drafter is None or known_verifier(self.method, True).scheme.lossless


Plan = list[tuple[list[Question], Contestant]]  # questions asked together, and whom


def contestants(config: EvalConfig) -> list[Contestant]:
    """At each temperature and batch size: the baseline, twice; every pair that fits; the peers.

    transformers' methods complete one prompt at a time. Raises InputError for a bad list, and for
    two contestants of one name, which their trees' files or drafters' folders give them.
    """
    # 1. Who answers at each temperature and batch size.
    rows = [Contestant(BASELINE, again=again) for again in (False, True) if config.baseline]
    rows += pairs(config)[0]
    for peer in peers_of(config):
        if peer == TRANSFORMERS:
            methods = [name for name in METHODS if name != ASSISTED or config.assistant]
            rows += [Contestant(name, peer=peer) for name in methods]
        else:
            address, _, model = peer.partition(",")
            rows.append(Contestant(model or SERVED, peer=address))

    # 2. Their names.
    batches = numbers_of("batch", config.batch)
    every = product(map(float, listed("temperature", config.temperature)), batches, rows)
    found = [
        named(replace(row, temperature=temperature, batch=batch), config, len(batches) > 1)
        for temperature, batch, row in every
        if row.peer != TRANSFORMERS or batch == 1
    ]
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"two configurations would both be called {twice[0]}: rename a tree file or a "
            "drafter's folder"
        )
    return found


def named(one: Contestant, config: EvalConfig, batches: bool) -> Contestant:
    """With labels, and a name that can be a file's. batches: whether there are several sizes."""
    several = one.drafter and len(drafters_of(config)) > 1
    drafter = DrafterSpec.parse(one.drafter).short if one.drafter and several else ""
    tree = PurePath(one.tree).name if one.tree else ""
    again, batch = " again" if one.again else "", str(one.batch) if batches else ""
    mark = ("" if one.lossless else " (lossy)") + (f", {one.peer}" if one.peer else "")
    parts = (
        PurePath(config.target).name,
        one.peer.rpartition("//")[2] if one.peer and one.peer != TRANSFORMERS else "",
        drafter,
        one.method,
        tree.removesuffix(".json"),
        f"t{one.temperature:g}{again}",
        batch and f"b{batch}",
    )
    labels = drafter, one.method + again + mark, tree, f"{one.temperature:g}", batch
    name = re.sub(r"[^\w.=-]+", "-", "-".join(part for part in parts if part))
    return replace(one, labels=labels, name=name)


def pairs(config: EvalConfig) -> tuple[list[Contestant], list[str]]:
    """(every drafter with every verifier and tree that it fits, why others were left out).

    A drafter's tree wins over a verifier's, a verifier's over `--tree`. Next to other drafters, one
    of one-hot tokens takes no tree, and takes `topk` if it fits no verifier named.
    Raises InputError if a single drafter does not fit all verifiers and trees, or nothing fits.
    """
    drafters, verifiers = drafters_of(config), listed("verifier", config.verifier)
    trees: list[str | None] = [*listed("tree", config.tree)] or [None]
    fitting: list[Contestant] = []
    reasons: list[str] = []
    for drafter in drafters:
        # 1. The verifiers and trees that this drafter fits.
        one_hot, name = drafter.kind.one_hot and len(drafters) > 1, drafter.written
        rows: list[Contestant] = []
        for verifier, _, verifiers_tree in (name.partition("@") for name in verifiers):
            own = drafter.tree or verifiers_tree
            for tree in [own] if own else trees:
                tree = None if one_hot else tree
                try:
                    known = known_verifier(verifier, config.allow_lossy)
                    check_named(drafter, known, policy(tree) if tree else None)
                except InputError as error:
                    reasons.append(f"{name} with {verifier}: {error}")
                    if len(drafters) == 1:
                        raise InputError(reasons[-1]) from None
                else:
                    rows.append(Contestant(verifier, name, tree))

        # 2. One-hot tokens have no draft distribution, which `topk` does without.
        fitting += rows or [Contestant("topk", name)] * one_hot

    # 3. Each pair and reason once.
    if not fitting:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(fitting)), list(dict.fromkeys(reasons))


def planned(
    questions: list[Question], chosen: Sequence[Contestant], there: set[tuple[str, int | str]]
) -> Plan:
    """The questions that each contestant has not completed yet, in the order to ask them.

    Contestants take turns, so that none of them has the machine at a better time. there: (contestant,
    question) of completions.
    """
    sizes = {one.batch: one.batch if one.batch == 1 else WAVES * one.batch for one in chosen}
    largest = max(sizes.values())
    plan: Plan = []
    for start in range(0, len(questions), largest):
        end = start + largest
        for batch, size in sizes.items():
            own = [one for one in chosen if one.batch == batch]
            again = asked_again(-(-len(questions) // size))
            for first in range(start, min(end, len(questions)), size):
                for one in in_order(own, first // size):
                    group = questions[first : min(first + size, end)]
                    left = [q for q in group if (one.name, q.question_id) not in there]
                    if left and (not one.again or first // size in again):
                        plan.append((left, one))
    return plan


def in_order(chosen: Sequence[Contestant], number: int) -> list[Contestant]:
    """The order of the contestants for question `number`: one row of a Williams square.

    Over n questions for n contestants (2 n where n is odd), each runs equally often in every
    position and directly after every other (Williams 1949). For n = 4:

        question 0   0 1 3 2
        question 1   1 2 0 3
        question 2   2 3 1 0
        question 3   3 0 2 1
    """
    # 1. Zigzag away from `number`: number, number + 1, number - 1, number + 2, …
    n = len(chosen)
    row = [(number + (j + 1) // 2 * (1 if j % 2 else -1)) % n for j in range(n)]

    # 2. For an odd n, the second n questions take the rows in reverse.
    return [chosen[i] for i in (reversed(row) if n % 2 and number // n % 2 else row)]


def asked_again(groups: int) -> set[int]:
    """The groups of questions that the baseline is asked a second time: a quarter, at least FEW.

    They are drawn at random: evenly spaced ones could all have the same order of contestants.
    """
    return set(Random(0).sample(range(groups), min(groups, max(FEW, groups // 4))))
