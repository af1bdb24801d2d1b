"""OUT/config.json: an evaluation's options, questions and models, and whether a run goes on."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any, NotRequired, TypedDict, cast

from treespec.draft.trained.kinds import KINDS
from treespec.errors import InputError
from treespec.eval.mtbench.config import EvalConfig, drafters_of
from treespec.eval.questions import Question
from treespec.files.atomic import read_json
from treespec.model.identity import identity_of, target_identity
from treespec.options import members_of

CHANGE_NO_ANSWER = ("out", "resamples", "allow_lossy", "run_code")  # options
PLACES = ("target", "head")  # compared by content: another path may lead to the same model
FORMAT = 1
MODELS = ("head", "model", *KINDS)  # kinds of drafters that are models


class Identities(TypedDict):
    """Digests of the target and of each drafter; "" for a drafter without files."""

    target: str
    drafts: list[str]


class Record(TypedDict):
    """questions: a digest of them. left_out: what was not asked, with reasons.

    A finished run adds the environment; a run that loads its models adds their identities and the
    configurations that do not fit.
    """

    format: int
    config: dict[str, Any]
    questions: str
    left_out: list[str]
    models: NotRequired[Identities]
    unfit: NotRequired[list[str]]
    environment: NotRequired[dict[str, object]]


def record_of(config: EvalConfig, questions: Sequence[Question], left_out: list[str]) -> Record:
    """The record of an evaluation before its models are loaded."""
    lines = json.dumps([asdict(question) for question in questions])
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return {
        "format": FORMAT,
        "config": asdict(config),
        "questions": digest,
        "left_out": left_out,
    }


def read_record(file: Path, record: Record) -> Record | None:
    """The record in OUT/config.json, or None if there is none.

    Raises InputError if it is of another evaluation. Where it has identities, target and head may
    have other paths than before: `same_models` compares the identities.
    """
    # 1. The record that is there, as a whole.
    if not file.exists():
        return None
    before = read_json(file, "choose another --out", FORMAT)
    try:
        theirs, ours = asdict(EvalConfig(**before["config"])), record["config"]
        same_questions = before["questions"] == record["questions"]
        before["environment"].items()
        identities_in(before.get("models"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not an evaluation's: choose another --out") from error

    # 2. Options and questions that differ.
    changes = [
        f"{name} was {theirs.get(name)}, now {value}"
        for name, value in ours.items()
        if name not in CHANGE_NO_ANSWER
        and not same(name, theirs.get(name), value, "models" in before)
    ]
    if not changes and not same_questions:
        changes = ["the questions themselves have changed"]
    if changes:
        raise InputError(
            f"{file.parent} holds another evaluation ({'; '.join(changes)}): choose another --out, "
            "or repeat its options to go on with it"
        )
    return cast(Record, before)


def dtype_of(config: EvalConfig, before: Record | None) -> str:
    """The dtype to load the target in: `auto` is the one that the evaluation was begun in."""
    if config.dtype != "auto" or before is None:
        return config.dtype
    return str(before["environment"].get("dtype", config.dtype))


def same(name: str, before: object, now: object, identities: bool) -> bool:
    """Whether an option may still mean the same.

    A target keeps the last part of its path: answer files are named after it. identities: whether
    the models themselves are compared elsewhere.
    """
    if name not in PLACES or not identities or before is None or now is None:
        return before == now
    return name != "target" or PurePath(str(before)).name == PurePath(str(now)).name


def models_of(config: EvalConfig) -> Identities:
    """The identities of the target and the drafters. Raises InputError."""
    return {
        "target": target_identity(config.target, config.variant),
        "drafts": [drafter_identity(name) for name in drafters_of(config)],
    }


def drafter_identity(drafter: str) -> str:
    """The identity of one drafter's models, of a datastore's folder or of a skip set's file.

    Joined drafters have one of each. That of a memory is not its answers', which may grow.
    """
    members = members_of(drafter)
    if len(members) > 1:
        return " ".join(filter(None, map(drafter_identity, members)))
    kind, _, value = members[0].partition(":")
    if kind in MODELS:
        names = [value] if kind != "model" or Path(value).exists() else value.split("+")
        return " ".join(map(identity_of, names))
    if kind == "suffix":
        return ""
    place = re.split(r",(?=\w+=)", value)[0]
    return identity_of(place) if place and Path(place).exists() else ""


def identities_in(models: Identities | None) -> list[str]:
    """The target's identity, then the drafters'. Before the models are loaded there is none."""
    return [models["target"], *models["drafts"]] if models else []


def moved(before: Record | None, config: EvalConfig) -> bool:
    """Whether target or head are named by another path than in the record."""
    return before is not None and any(
        before["config"].get(place) != getattr(config, place) for place in PLACES
    )


def same_models(before: Record | None, models: Identities, config: EvalConfig, out: Path) -> None:
    """Raises InputError where other models gave the answers that are there."""
    names = [f"target {config.target}", *(f"drafter {name}" for name in drafters_of(config))]
    earlier = identities_in(before.get("models") if before else None)
    for name, theirs, ours in zip(names, earlier, identities_in(models), strict=False):
        if theirs != ours:
            raise InputError(
                f"the {name} has changed since {out} was begun: answers of both cannot be mixed; "
                "choose another --out"
            )
