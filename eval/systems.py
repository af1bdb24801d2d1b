"""List the systems that an evaluation compares (the baseline, drafters and peers), and plan when each is asked.

The module does not import torch, so that names that do not fit each other are refused at once.
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
from treespec.eval.common import split_list
from treespec.eval.config import (
    TRANSFORMERS_PEER,
    EvalConfig,
    is_oracle,
    parse_drafters,
    parse_peers,
    parse_whole_numbers,
)
from treespec.eval.intervals import MIN_QUESTIONS
from treespec.eval.questions import Question
from treespec.options import join_or
from treespec.trees.policy import parse_policy
from treespec.verify.facts import parse_verifier

BASELINE_NAME = "baseline"
GENERATE_METHOD = "generate"
ASSISTED_METHOD = "assisted generation"
EARLY_EXIT_METHOD = "early exit"
SERVED_MODEL = "what it serves"  # the model of a server that `--peers` does not name
# transformers' methods: the arguments of `model.generate` that choose each
TRANSFORMERS_METHODS: dict[str, dict[str, int]] = {
    GENERATE_METHOD: {},
    "prompt lookup 3": {"prompt_lookup_num_tokens": 3},
    "prompt lookup 10": {"prompt_lookup_num_tokens": 10},
    ASSISTED_METHOD: {},
    EARLY_EXIT_METHOD: {},
    "MTP": {"use_mtp": True},
}
METHODS_BY_REQUEST = (
    EARLY_EXIT_METHOD,
    "MTP",
)  # asked only if `--peers` names them: they need a model made for them
# A group has several batches, so that a new question can replace a finished one.
BATCHES_PER_GROUP = 4


@dataclass(frozen=True)
class System:
    """One way to complete prompts. The ledger calls a system a contestant.

    Attributes:
        method: `baseline` is one-token decoding; else a verifier as `--verifier` names it, one of
            `TRANSFORMERS_METHODS`, or a server's model.
        drafter: `kind:value`; None for the baseline and for peers.
        tree: as `--tree` names it; None: the default tree of verifier or drafter.
        temperature: of sampling; 0.0 is greedy.
        batch: number of completions at a time.
        peer: `transformers` or a server's address; None: treespec answers.
        again: whether this is the baseline a second time (A/A). Its speed relative to the first time shows the
            clock's noise.
        labels: drafter, method, tree, temperature and batch in the tables; "" where they do not differ.
        name: name in the ledger and of the file of its completions.
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
        """Whether its completions have the target's distribution; peers are assumed to."""
        return self.drafter is None or parse_verifier(self.method, True).scheme.lossless


Plan = list[
    tuple[list[Question], System]
]  # (questions that are asked together, the system to ask), in order


def list_systems(config: EvalConfig) -> list[System]:
    """List the systems at each temperature and batch size: the baseline, twice; every pair that fits; the peers.

    transformers' methods complete one prompt at a time, so they are listed at batch size 1 only.

    Raises:
        InputError: an option's list is bad, or two systems would have one name, because their tree files or their
            drafters' folders do.
    """
    # 1. The systems of one temperature and batch size.
    answerers = list[System]()
    if config.baseline:
        answerers += [System(BASELINE_NAME), System(BASELINE_NAME, again=True)]
    answerers += list_drafter_pairs(config)[0]
    for peer in parse_peers(config):
        answerers += list_peer_methods(peer, config)
    if not answerers:
        raise InputError(
            "nothing is asked: name a --head, a --drafter or --peers, or leave out --no-baseline"
        )

    # 2. The systems of all temperatures and batch sizes, with names.
    temperatures = split_list("temperature", config.temperature)
    batches = parse_whole_numbers("batch", config.batch)
    systems = list[System]()
    for temperature, batch, answerer in product(temperatures, batches, answerers):
        if answerer.peer != TRANSFORMERS_PEER or batch == 1:
            system = replace(answerer, temperature=float(temperature), batch=batch)
            systems.append(name_system(system, config))
    check_names(systems)
    return systems


def list_peer_methods(peer: str, config: EvalConfig) -> list[System]:
    """List the systems of one item of `--peers`. Raises InputError for a method that transformers does not have."""
    address, _, model = peer.partition(",")
    if address != TRANSFORMERS_PEER:
        return [System(model or SERVED_MODEL, peer=address)]
    if not model:
        left_out = list(METHODS_BY_REQUEST)
        if not config.assistant:
            left_out.append(ASSISTED_METHOD)
        return [System(name, peer=address) for name in TRANSFORMERS_METHODS if name not in left_out]
    if model not in TRANSFORMERS_METHODS:
        raise InputError(
            f"--peers {peer}: transformers' methods are {join_or(TRANSFORMERS_METHODS)}"
        )
    if model == ASSISTED_METHOD and not config.assistant:
        raise InputError(f"--peers {peer} needs an --assistant")
    return [System(model, peer=address)]


def check_names(systems: Sequence[System]) -> None:
    """Raise InputError if two systems have one name."""
    names = [system.name for system in systems]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two configurations would both be called {name}: rename a tree file or a "
                "drafter's folder"
            )


def name_system(system: System, config: EvalConfig) -> System:
    """Give a system its labels, and a name that can be a file's."""
    # 1. The labels.
    drafter = ""
    if system.drafter and len(parse_drafters(config)) > 1:
        drafter = DrafterSpec.parse(system.drafter).short
    batch = ""
    if len(parse_whole_numbers("batch", config.batch)) > 1:
        batch = str(system.batch)
    tree = PurePath(system.tree or "").name
    method = system.method
    repeat_suffix = ""
    if system.again:
        method = "A/A control"
        repeat_suffix = " again"
    if not system.lossless:
        method += " (lossy)"
    if system.peer:
        method += f", {system.peer}"

    # 2. The name.
    parts = [
        PurePath(config.target).name,
        (system.peer or "").rpartition("//")[2].removeprefix(TRANSFORMERS_PEER),
        drafter,
        system.method,
        tree.removesuffix(".json"),
        f"t{system.temperature:g}{repeat_suffix}",
    ]
    if batch:
        parts.append(f"b{batch}")
    return replace(
        system,
        labels=(drafter, method, tree, f"{system.temperature:g}", batch),
        name=re.sub(r"[^\w.=-]+", "-", "-".join(filter(None, parts))),
    )


def list_drafter_pairs(config: EvalConfig) -> tuple[list[System], list[str]]:
    """List every drafter with every verifier and tree that it fits, and the reasons why others were left out.

    A drafter's own tree has precedence over a verifier's, and a verifier's over `--tree`. If there are several
    drafters, one without draft distributions (one-hot) takes no tree, and takes `choose_one_hot_verifier` if it fits
    no named verifier.

    Raises:
        InputError: the only drafter misfits a verifier or tree, or no drafter fits any.
    """
    drafters = parse_drafters(config)
    if not drafters:
        return [], []
    fitting_pairs: list[System] = []
    reasons: list[str] = []
    for drafter in drafters:
        is_one_hot = drafter.kind.one_hot and len(drafters) > 1
        pairs: list[System] = []
        for verifier, tree in list_choices(config, drafter, is_one_hot):
            try:
                pairs.append(match_drafter(drafter, verifier, tree, config.allow_lossy))
            except InputError as error:
                reason = f"{drafter.written} with {verifier}: {error}"
                if len(drafters) == 1:
                    raise InputError(reason) from None
                reasons.append(reason)
        if is_one_hot and not pairs:
            pairs = [System(choose_one_hot_verifier(drafter), drafter.written)]
        fitting_pairs += pairs
    if not fitting_pairs:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(fitting_pairs)), list(dict.fromkeys(reasons))


def list_choices(
    config: EvalConfig, drafter: DrafterSpec, is_one_hot: bool
) -> list[tuple[str, str | None]]:
    """List the verifiers that the options name for a drafter, each with a tree; None stands for the default tree.

    is_one_hot: whether the drafter takes no tree.
    """
    trees: list[str | None] = list(split_list("tree", config.tree))
    choices = []
    for name in split_list("verifier", config.verifier):
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


def choose_one_hot_verifier(drafter: DrafterSpec) -> str:
    """Choose the verifier of a drafter without draft distributions: `topk` needs none, and an oracle takes `auto`."""
    if is_oracle(drafter.written):
        return "auto"
    return "topk"


def match_drafter(
    drafter: DrafterSpec, verifier: str, tree: str | None, allow_lossy: bool
) -> System:
    """Make the system of a drafter, verifier and tree. Raises InputError if they do not fit each other."""
    verifier_info = parse_verifier(verifier, allow_lossy)
    tree_policy = parse_policy(tree) if tree else None
    check_named(drafter, verifier_info, tree_policy)
    if is_oracle(drafter.written) and not verifier_info.coupled:
        raise InputError(
            f"an oracle replays the text of a seed, which {verifier} would draw otherwise: take --verifier auto"
        )
    return System(verifier, drafter.written, tree)


def plan_questions(
    questions: list[Question], all_systems: Sequence[System], completed: set[tuple[str, int | str]]
) -> Plan:
    """List the questions that each system has not completed yet, in the order to ask them.

    Systems take turns in a random order, and so do batch sizes, so that a change in the machine's speed hits all alike.
    The baseline is asked a quarter of the groups a second time, but at least `MIN_QUESTIONS` groups.

    Args:
        questions: all questions.
        all_systems: the systems to ask.
        completed: (system's name, question_id) of each completion in the ledger.
    """
    # 1. Questions asked together, by batch size.
    sizes = {system.batch: choose_group_size(system.batch) for system in all_systems}
    largest = max(sizes.values(), default=1)

    # 2. The systems to ask each group, ordered so that all batch sizes reach a question at about the same time.
    plan: list[tuple[int, list[Question], System]] = []
    for batch, size in sizes.items():
        systems = [system for system in all_systems if system.batch == batch]
        groups = [questions[start : start + size] for start in range(0, len(questions), size)]
        turns = take_turns(systems, len(groups))
        for number, (group, group_systems) in enumerate(zip(groups, turns, strict=True)):
            for system in group_systems:
                unanswered = [q for q in group if (system.name, q.question_id) not in completed]
                if unanswered:
                    plan.append((number * size // largest, unanswered, system))
    plan.sort(key=itemgetter(0))
    return [(group, system) for _, group, system in plan]


def choose_group_size(batch: int) -> int:
    """Choose the number of questions that are asked together at a batch size."""
    if batch == 1:
        return 1
    return BATCHES_PER_GROUP * batch


def take_turns(systems: Sequence[System], groups: int) -> Iterator[list[System]]:
    """Yield the systems to ask each group of questions, in a random order. Few groups ask the baseline's repeat."""
    repeat_groups = Random(0).sample(range(groups), min(groups, max(MIN_QUESTIONS, groups // 4)))
    for number in range(groups):
        group_systems = [
            system for system in systems if number in repeat_groups or not system.again
        ]
        yield Random(number).sample(group_systems, len(group_systems))
