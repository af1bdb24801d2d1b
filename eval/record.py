"""What an evaluation is of, as the head of its ledger, and whether a ledger goes on with it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath

from treespec.draft.drafters import DrafterSpec
from treespec.draft.trained.kinds import KINDS
from treespec.errors import InputError
from treespec.eval.common import differences
from treespec.eval.config import EvalConfig, drafters_of
from treespec.eval.ledger import FORMAT, Entry
from treespec.eval.questions import Question
from treespec.model.identity import identity_of, target_identity

CHANGE_NO_COMPLETION = ("out", "allow_lossy", "run_code")  # options
MODELS = ("head", "model", *KINDS)  # kinds of drafters that are models


def head_of(config: EvalConfig, questions: Sequence[Question], processes: int) -> Entry:
    """The head before the models are loaded.

    Its field `same` has what must not change. Contestants are named after the last part of the
    target's path; target and drafters are compared by content, so they may be moved.
    """
    lines = json.dumps([(q.question_id, q.category, q.turns) for q in questions])
    options = asdict(config)
    free = {*CHANGE_NO_COMPLETION, "head", *(["dtype"] if config.dtype == "auto" else [])}
    same = {name: x for name, x in options.items() if name not in free}
    same |= {
        "target": PurePath(config.target).name,
        "processes": processes,
        "the questions": hashlib.sha256(lines.encode()).hexdigest(),
    }
    return {"format": FORMAT, "options": options, "processes": processes, "same": same}


def models_of(config: EvalConfig) -> dict[str, str]:
    """The identities of the target and of each drafter."""
    drafters = {name: drafter_identity(name) for name, _ in drafters_of(config)}
    target = {"the target's files": target_identity(config.target, config.placement)}
    return target | {f"the files of drafter {i + 1}": x for i, x in enumerate(drafters.values())}


def check_same(before: Entry, now: Mapping[str, object], out: Path) -> None:
    """Raises InputError, with what differs, where a ledger is of something else than `now`."""
    if changes := differences(before["same"], now):
        raise InputError(
            f"{out} holds another evaluation ({changes}): choose another --out, "
            "or repeat its options to go on with it"
        )


def drafter_identity(drafter: str) -> str:
    """The identity of one drafter's models, of a datastore's folder or of a skip set's file.

    Joined drafters have one of each. That of a suffix cache is not its answers', which may grow.
    """
    found = []
    for spec in DrafterSpec.parse(drafter).members:
        model = spec.kind.is_head or spec.kind.several
        if model or (spec.place and spec.kind.name != "suffix" and Path(spec.place).exists()):
            found += [identity_of(name) for name in spec.models]
    return " ".join(found)
