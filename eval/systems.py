"""Who answers the questions of an evaluation, and when: one-token decoding, drafters, and peers.

It loads no torch, so that names that do not fit each other are refused at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import PurePath
from random import Random

from treespec.draft.pairing import check_named
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.eval.config import TRANSFORMERS, EvalConfig, drafters_of, numbers_of, peers_of
from treespec.eval.intervals import FEW
from treespec.eval.questions import Question
from treespec.options import either
from treespec.trees.policy import policy
from treespec.verify.facts import known_verifier

BASELINE = "baseline"
GENERATE = "generate"
ASSISTED = "assisted generation"
EARLY_EXIT = "early exit"
SERVED = "what it serves"  # the model of a server that `--peers` does not name
# transformers' methods: the arguments of `model.generate` that choose each
METHODS: dict[str, dict[str, int]] = {
    GENERATE: {},
    "prompt lookup 3": {"prompt_lookup_num_tokens": 3},
    "prompt lookup 10": {"prompt_lookup_num_tokens": 10},
    ASSISTED: {},
    EARLY_EXIT: {},
    "MTP": {"use_mtp": True},
}
UNASKED = (EARLY_EXIT, "MTP")  # unless `--peers` names them: they are for models made for them
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
        address, _, model = peer.partition(",")
        methods = [model or SERVED]
        if peer == TRANSFORMERS:
            left_out = UNASKED if config.assistant else (*UNASKED, ASSISTED)
            methods = [name for name in METHODS if name not in left_out]
        elif address == TRANSFORMERS and model not in METHODS:
            raise InputError(f"--peers {peer}: transformers' methods are {either(METHODS)}")
        elif model == ASSISTED and not config.assistant:
            raise InputError(f"--peers {peer} needs an --assistant")
        rows += [Contestant(name, peer=address) for name in methods]

    # 2. Their names.
    every = product(
        map(float, listed("temperature", config.temperature)),
        numbers_of("batch", config.batch),
        rows,
    )
    found = [
        named(replace(row, temperature=temperature, batch=batch), config)
        for temperature, batch, row in every
        if row.peer != TRANSFORMERS or batch == 1
    ]
    names = [one.name for one in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(
            f"two configurations would both be called {twice[0]}: rename a tree file or a "
            "drafter's folder"
        )
    return found


def named(one: Contestant, config: EvalConfig) -> Contestant:
    """With labels, and a name that can be a file's."""
    several = one.drafter and len(drafters_of(config)) > 1
    drafter = DrafterSpec.parse(one.drafter).short if one.drafter and several else ""
    tree = PurePath(one.tree or "").name
    again = " again" * one.again
    batch = str(one.batch) if len(numbers_of("batch", config.batch)) > 1 else ""
    mark = "" if one.lossless else " (lossy)"
    server = (one.peer or "").rpartition("//")[2]
    parts = (
        PurePath(config.target).name,
        server.removeprefix(TRANSFORMERS),
        drafter,
        one.method,
        tree.removesuffix(".json"),
        f"t{one.temperature:g}{again}",
        batch and f"b{batch}",
    )
    method = one.method + again + mark + (f", {one.peer}" if one.peer else "")
    return replace(
        one,
        labels=(drafter, method, tree, f"{one.temperature:g}", batch),
        name=re.sub(r"[^\w.=-]+", "-", "-".join(filter(None, parts))),
    )


def pairs(config: EvalConfig) -> tuple[list[Contestant], list[str]]:
    """(every drafter with every verifier and tree that it fits, why others were left out).

    A drafter's tree wins over a verifier's, a verifier's over `--tree`. Next to other drafters, one
    of one-hot tokens takes no tree, and takes `topk` if it fits no verifier named.
    Raises InputError if a single drafter does not fit all verifiers and trees, or nothing fits.
    """
    drafters = drafters_of(config)
    trees: list[str | None] = [*listed("tree", config.tree)] or [None]
    verifiers = [name.partition("@") for name in listed("verifier", config.verifier)]
    fitting: list[Contestant] = []
    reasons: list[str] = []
    for drafter in drafters:
        # 1. The verifiers and trees that this drafter fits.
        one_hot = drafter.kind.one_hot and len(drafters) > 1
        name = drafter.written
        rows: list[Contestant] = []
        for (verifier, _, own), other in product(verifiers, trees):
            tree = None if one_hot else drafter.tree or own or other
            try:
                known = known_verifier(verifier, config.allow_lossy)
                check_named(drafter, known, policy(tree) if tree else None)
                rows.append(Contestant(verifier, name, tree))
            except InputError as error:
                reasons.append(f"{name} with {verifier}: {error}")
                if len(drafters) == 1:
                    raise InputError(reasons[-1]) from None

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

    Contestants take turns in a random order, and so do batch sizes, so that none of them has the
    machine at a better time. The baseline is asked a quarter of the groups of questions a second
    time, `FEW` at least. there: (contestant, question) of completions.
    """
    sizes = {one.batch: one.batch if one.batch == 1 else WAVES * one.batch for one in chosen}
    plan: list[tuple[int, list[Question], Contestant]] = []
    for batch, size in sizes.items():
        groups = [questions[at : at + size] for at in range(0, len(questions), size)]
        again = Random(0).sample(range(len(groups)), min(len(groups), max(FEW, len(groups) // 4)))
        for number, group in enumerate(groups):
            own = [
                one for one in chosen if one.batch == batch and (number in again or not one.again)
            ]
            for one in Random(number).sample(own, len(own)):
                left = [q for q in group if (one.name, q.question_id) not in there]
                if left:
                    plan.append((number * size // max(sizes.values()), left, one))
    return [(group, one) for _, group, one in sorted(plan, key=itemgetter(0))]
