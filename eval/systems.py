"""The systems that an evaluation compares, and when each is asked: one-token decoding, drafters, and peers.

It loads no torch, so that names that do not fit each other are refused at once.
"""

import re
from collections.abc import Iterator, Sequence
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
    """List who answers, at each temperature and batch size: the baseline, twice; every pair that fits; the peers.

    transformers' methods complete one prompt at a time. Raises InputError for a bad list, and for
    two contestants of one name, which their trees' files or drafters' folders give them.
    """
    # 1. Who answers at each temperature and batch size.
    rows = list[Contestant]()
    if config.baseline:
        rows += [Contestant(BASELINE), Contestant(BASELINE, again=True)]
    rows += pairs(config)[0]
    for peer in peers_of(config):
        rows += list_peer_methods(peer, config)

    # 2. All of them, with names.
    temperatures = listed("temperature", config.temperature)
    batches = numbers_of("batch", config.batch)
    systems = list[Contestant]()
    for temperature, batch, row in product(temperatures, batches, rows):
        if row.peer != TRANSFORMERS or batch == 1:
            system = replace(row, temperature=float(temperature), batch=batch)
            systems.append(named(system, config))
    check_names(systems)
    return systems


def list_peer_methods(peer: str, config: EvalConfig) -> list[Contestant]:
    """The methods of a part of `--peers`. Raises InputError for one that transformers does not have."""
    address, _, model = peer.partition(",")
    if address != TRANSFORMERS:
        return [Contestant(model or SERVED, peer=address)]
    if not model:
        left_out = list(UNASKED)
        if not config.assistant:
            left_out.append(ASSISTED)
        return [Contestant(name, peer=address) for name in METHODS if name not in left_out]
    if model not in METHODS:
        raise InputError(f"--peers {peer}: transformers' methods are {either(METHODS)}")
    if model == ASSISTED and not config.assistant:
        raise InputError(f"--peers {peer} needs an --assistant")
    return [Contestant(model, peer=address)]


def check_names(systems: Sequence[Contestant]) -> None:
    """Raise InputError for two contestants of one name."""
    names = [system.name for system in systems]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two configurations would both be called {name}: rename a tree file or a "
                "drafter's folder"
            )


def named(system: Contestant, config: EvalConfig) -> Contestant:
    """Give a contestant its labels, and a name that can be a file's."""
    # 1. What tells it from the others.
    drafter = ""
    if system.drafter and len(drafters_of(config)) > 1:
        drafter = DrafterSpec.parse(system.drafter).short
    batch = ""
    if len(numbers_of("batch", config.batch)) > 1:
        batch = str(system.batch)
    tree = PurePath(system.tree or "").name
    again = " again" if system.again else ""
    method = system.method + again
    if not system.lossless:
        method += " (lossy)"
    if system.peer:
        method += f", {system.peer}"

    # 2. The name.
    parts = [
        PurePath(config.target).name,
        (system.peer or "").rpartition("//")[2].removeprefix(TRANSFORMERS),
        drafter,
        system.method,
        tree.removesuffix(".json"),
        f"t{system.temperature:g}{again}",
    ]
    if batch:
        parts.append(f"b{batch}")
    return replace(
        system,
        labels=(drafter, method, tree, f"{system.temperature:g}", batch),
        name=re.sub(r"[^\w.=-]+", "-", "-".join(filter(None, parts))),
    )


def pairs(config: EvalConfig) -> tuple[list[Contestant], list[str]]:
    """List every drafter with every verifier and tree that it fits, and why others were left out.

    A drafter's tree wins over a verifier's, a verifier's over `--tree`. Next to other drafters, one
    of one-hot tokens takes no tree, and takes `topk` if it fits no verifier named.
    Raises InputError if a single drafter does not fit all verifiers and trees, or nothing fits.
    """
    drafters = drafters_of(config)
    fitting: list[Contestant] = []
    reasons: list[str] = []
    for drafter in drafters:
        is_one_hot = drafter.kind.one_hot and len(drafters) > 1
        rows: list[Contestant] = []
        for verifier, tree in list_choices(config, drafter, is_one_hot):
            try:
                rows.append(match_drafter(drafter, verifier, tree, config.allow_lossy))
            except InputError as error:
                reason = f"{drafter.written} with {verifier}: {error}"
                if len(drafters) == 1:
                    raise InputError(reason) from None
                reasons.append(reason)
        if is_one_hot and not rows:  # `topk` needs no draft distribution
            rows = [Contestant("topk", drafter.written)]
        fitting += rows
    if not fitting:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(fitting)), list(dict.fromkeys(reasons))


def list_choices(
    config: EvalConfig, drafter: DrafterSpec, is_one_hot: bool
) -> list[tuple[str, str | None]]:
    """The verifiers that the options name for a drafter, each with a tree; None stands for the default tree.

    is_one_hot: whether the drafter takes no tree.
    """
    trees: list[str | None] = list(listed("tree", config.tree))
    choices = []
    for name in listed("verifier", config.verifier):
        verifier, _, verifier_tree = name.partition("@")
        for tree in trees or [None]:
            if is_one_hot:
                tree = None
            elif drafter.tree:
                tree = drafter.tree
            elif verifier_tree:
                tree = verifier_tree
            choices.append((verifier, tree))
    return choices


def match_drafter(
    drafter: DrafterSpec, verifier: str, tree: str | None, allow_lossy: bool
) -> Contestant:
    """A drafter with a verifier and tree. Raises InputError for those that do not fit each other."""
    verifier_info = known_verifier(verifier, allow_lossy)
    tree_policy = policy(tree) if tree else None
    check_named(drafter, verifier_info, tree_policy)
    return Contestant(verifier, drafter.written, tree)


def planned(
    questions: list[Question], chosen: Sequence[Contestant], there: set[tuple[str, int | str]]
) -> Plan:
    """List the questions that each contestant has not completed yet, in the order to ask them.

    Contestants take turns in a random order, and so do batch sizes, so that none of them has the
    machine at a better time. The baseline is asked a quarter of the groups of questions a second
    time, `FEW` at least. there: (contestant, question) of completions.
    """
    # 1. Questions asked together, by batch size.
    sizes = {system.batch: choose_group_size(system.batch) for system in chosen}
    largest = max(sizes.values(), default=1)

    # 2. Whom to ask each group, and when: batch sizes reach a question at about the same time.
    plan: list[tuple[int, list[Question], Contestant]] = []
    for batch, size in sizes.items():
        systems = [system for system in chosen if system.batch == batch]
        groups = [questions[at : at + size] for at in range(0, len(questions), size)]
        turns = take_turns(systems, len(groups))
        for number, (group, asked) in enumerate(zip(groups, turns, strict=True)):
            for system in asked:
                unanswered = [q for q in group if (system.name, q.question_id) not in there]
                if unanswered:
                    plan.append((number * size // largest, unanswered, system))
    plan.sort(key=itemgetter(0))
    return [(group, system) for _, group, system in plan]


def choose_group_size(batch: int) -> int:
    """How many questions are asked together at a batch size."""
    if batch == 1:
        return 1
    return WAVES * batch


def take_turns(systems: Sequence[Contestant], groups: int) -> Iterator[list[Contestant]]:
    """Yield whom to ask each group of questions, in a random order. Few groups have the baseline a second time."""
    repeated = Random(0).sample(range(groups), min(groups, max(FEW, groups // 4)))
    for number in range(groups):
        asked = [system for system in systems if number in repeated or not system.again]
        yield Random(number).sample(asked, len(asked))
