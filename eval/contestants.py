"""Who answers the questions of an evaluation: one-token decoding, drafters, and peers.

It loads no torch, so that names that do not fit each other are refused at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import PurePath

from treespec.draft.drafters import DrafterSpec
from treespec.draft.pairing import check_named, check_one_hot, check_pair
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.eval.config import TRANSFORMERS, EvalConfig, drafters_of, numbers_of, peers_of
from treespec.trees.policy import policy
from treespec.verify.facts import SCHEMES, known_verifier, stands_for

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


@dataclass(frozen=True)
class Contestant:
    """One way to complete prompts.

    method: `baseline` is one-token decoding, others are a verifier as `--verifier` names it, one of
    `METHODS`, or a server's model. drafter: `kind:value`; None for the baseline and for peers. tree:
    None is the default of verifier or drafter. batch: completions at a time. peer: `transformers` or
    a server's address; None: treespec answers. again: the baseline a second time (A/A), whose speed
    over the first shows the clock's noise. name: in the ledger, and of its file of completions.
    """

    method: str
    drafter: str | None = None
    tree: str | None = None
    temperature: float = 0.0
    batch: int = 1
    peer: str | None = None
    again: bool = False
    name: str = ""

    @property
    def lossless(self) -> bool:
        """Whether its completions have the target's distribution; peers are taken to have it."""
        return self.drafter is None or known_verifier(self.method, True).scheme.lossless


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
    every = product(map(float, listed("temperature", config.temperature)), batches_of(config), rows)
    found = [
        _named(replace(row, temperature=temperature, batch=batch), config)
        for temperature, batch, row in every
        if row.peer != TRANSFORMERS or batch == 1
    ]
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"two configurations would both be called {twice[0]}: rename a tree file or a "
            "drafter's folder"
        )
    return list(dict.fromkeys(found))


def batches_of(config: EvalConfig) -> list[int]:
    return numbers_of("batch", config.batch)


def _named(one: Contestant, config: EvalConfig) -> Contestant:
    """With target, drafter, method, tree, temperature and batch in a name that can be a file's."""
    several = len(drafters_of(config)) > 1
    drafter = DrafterSpec.parse(one.drafter).short if one.drafter and several else ""
    parts = (
        PurePath(config.target).name,
        one.peer.rpartition("//")[2] if one.peer and one.peer != TRANSFORMERS else "",
        drafter,
        one.method,
        (one.tree or "").removesuffix(".json").rpartition("/")[2],
        f"t{one.temperature:g}",
        "again" if one.again else "",
        f"b{one.batch}" if len(batches_of(config)) > 1 else "",
    )
    return replace(one, name=re.sub(r"[^\w.=-]+", "-", "-".join(part for part in parts if part)))


def pairs(config: EvalConfig, files: bool = False) -> tuple[list[Contestant], list[str]]:
    """(every drafter with every verifier and tree that it fits, why others were left out).

    files: read a head's small files too, which tell what it can draft.
    A drafter's tree wins over a verifier's, a verifier's over `--tree`. Next to other drafters, one
    that hands over given tokens takes no tree, and takes `topk` if it fits no verifier named.
    Raises InputError if a single drafter does not fit all verifiers and trees, or nothing fits.
    """
    drafters, verifiers = drafters_of(config), listed("verifier", config.verifier)
    trees: Sequence[str | None] = [None] if config.tree is None else listed("tree", config.tree)
    fitting: list[Contestant] = []
    reasons: list[str] = []
    for drafter, drafters_tree in drafters:
        # 1. The verifiers and trees that this drafter fits.
        given = DrafterSpec.parse(drafter).kind.one_hot and len(drafters) > 1
        rows: list[Contestant] = []
        for verifier, _, verifiers_tree in (name.partition("@") for name in verifiers):
            named = drafters_tree or verifiers_tree
            for tree in [named] if named else trees:
                pair = Contestant(verifier, drafter, None if given else tree)
                try:
                    check_paired(pair, config.allow_lossy, files)
                except InputError as error:
                    reasons.append(f"{drafter} with {verifier}: {error}")
                    if len(drafters) == 1:
                        raise InputError(reasons[-1]) from None
                else:
                    rows.append(pair)

        # 2. Given tokens have no draft distribution, which `topk` does without.
        fitting += [Contestant("topk", drafter)] if given and not rows else rows

    # 3. Each pair and reason once.
    if not fitting:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(fitting)), list(dict.fromkeys(reasons))


def check_paired(pair: Contestant, allow_lossy: bool, files: bool) -> None:
    """Raises InputError for unknown names, and if they do not fit each other or the drafter."""
    known, tree = known_verifier(pair.method, allow_lossy), pair.tree and policy(pair.tree)
    assert pair.drafter
    spec = DrafterSpec.parse(pair.drafter)
    if files:
        check_named(spec, known, tree or None)
    elif spec.kind.one_hot:
        check_one_hot(spec.kind.name, known, pair.tree)
    elif tree:
        name = stands_for(known.paced, False, tree)
        check_pair(tree, SCHEMES[name] if name else known.scheme)
