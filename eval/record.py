"""What an evaluation is of, as the head of its ledger, and whether a ledger goes on with it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath

from treespec.draft.trained.kinds import KINDS
from treespec.errors import InputError
from treespec.eval.config import EvalConfig, drafters_of
from treespec.eval.ledger import FORMAT, Entry
from treespec.eval.questions import Question
from treespec.model.identity import identity_of, target_identity
from treespec.options import members_of

CHANGE_NO_COMPLETION = ("out", "allow_lossy", "run_code")  # options
MODELS = ("head", "model", *KINDS)  # kinds of drafters that are models


def head_of(config: EvalConfig, questions: Sequence[Question], processes: int) -> Entry:
    """The head before the models are loaded.

    Its field `same` has what must not change. Contestants are named after the last part of the
    target's path; target and drafters are compared by content, so they may be moved.
    """
    lines = json.dumps([asdict(question) for question in questions])
    options = asdict(config)
    same = {name: x for name, x in options.items() if name not in (*CHANGE_NO_COMPLETION, "head")}
    same |= {
        "target": PurePath(config.target).name,
        "processes": processes,
        "the questions": hashlib.sha256(lines.encode()).hexdigest(),
    }
    return {"format": FORMAT, "options": options, "processes": processes, "same": same}


def models_of(config: EvalConfig) -> dict[str, str]:
    """The identities of the target and of each drafter."""
    drafters = {name: drafter_identity(name) for name, _ in drafters_of(config)}
    target = {"the target's files": target_identity(config.target, config.variant)}
    return target | {f"the files of drafter {i + 1}": x for i, x in enumerate(drafters.values())}


def check_same(before: Entry, now: Mapping[str, object], out: Path) -> None:
    """Raises InputError, with what differs, where a ledger is of something else than `now`."""
    changes = [
        f"{name} changed" if name.startswith("the ") else f"{name} was {before[name]}, now {x}"
        for before in [before["same"]]
        for name, x in now.items()
        if before.get(name, x) != x
    ]
    if changes:
        raise InputError(
            f"{out} holds another evaluation ({'; '.join(changes)}): choose another --out, "
            "or repeat its options to go on with it"
        )


def drafter_identity(drafter: str) -> str:
    """The identity of one drafter's models, of a datastore's folder or of a skip set's file.

    Joined drafters have one of each. That of a suffix cache is not its answers', which may grow.
    """
    members = members_of(drafter)
    if len(members) > 1:
        return " ".join(filter(None, map(drafter_identity, members)))
    kind, _, value = members[0].partition(":")
    if kind in MODELS:
        names = [value] if kind != "model" or Path(value).exists() else value.split("+")
        return " ".join(map(identity_of, names))
    place = re.split(r",(?=\w+=)", value)[0]
    return identity_of(place) if kind != "suffix" and place and Path(place).exists() else ""
