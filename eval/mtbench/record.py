"""What OUT/config.json says of an evaluation, and whether the same one goes on."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from treespec.draft.trained.kinds import KINDS
from treespec.errors import InputError
from treespec.eval.mtbench.config import EvalConfig, drafters_of
from treespec.eval.questions import Question
from treespec.files import read_json
from treespec.identity import identity_of

SUMMARY_ONLY = ("out", "resamples", "allow_lossy")  # options that change no answer
PLACES = ("target", "head")  # known by content: the same model may be named by another path
REMOVED = ("compile",)  # options of earlier versions, which changed no law
MODELS = ("head", "model", *KINDS)  # drafters that are models


def record_of(
    config: EvalConfig, questions: Sequence[Question], left_out: list[str]
) -> dict[str, Any]:
    """What OUT/config.json says, but for the models' identities and the environment that it ran in."""
    asked = hashlib.sha256(
        json.dumps([asdict(question) for question in questions]).encode()
    ).hexdigest()
    return {"config": asdict(config), "questions": asked, "left_out": left_out}


def saved_config(record: dict[str, Any]) -> EvalConfig:
    """A record's options: removed ones are left out, newer ones have their defaults."""
    return EvalConfig(
        **{name: value for name, value in record["config"].items() if name not in REMOVED}
    )


def read_record(file: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """What OUT/config.json holds, if there is one. Raises InputError if it is of another evaluation.

    A target or head named by another path passes where the record has identities: `same_models` compares those.
    """
    if not file.exists():
        return None
    before = read_json(file, "choose another --out")
    try:
        theirs, ours = asdict(saved_config(before)), record["config"]
        same_questions = before["questions"] == record["questions"]
        before["environment"].items()
        listed_models(before)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not an evaluation's: choose another --out") from error
    changes = [
        f"{name} was {theirs.get(name)}, now {value}"
        for name, value in ours.items()
        if name not in SUMMARY_ONLY and not same(name, theirs.get(name), value, "models" in before)
    ]
    if not changes and not same_questions:
        changes = ["the questions themselves have changed"]
    if changes:
        raise InputError(
            f"{file.parent} holds another evaluation ({'; '.join(changes)}): choose another --out, "
            "or repeat its options to go on with it"
        )
    return before


def dtype_of(config: EvalConfig, before: dict[str, Any] | None) -> str:
    """What the target is loaded in: `auto` is what it was when the evaluation was begun."""
    if config.dtype != "auto" or before is None:
        return config.dtype
    return str(before["environment"].get("dtype", config.dtype))


def same(name: str, before: Any, now: Any, identities: bool) -> bool:
    """Whether an option may be the same. Answers are named after the target's last part, which has to stay."""
    if name not in PLACES or not identities or before is None or now is None:
        return bool(before == now)
    return name != "target" or PurePath(before).name == PurePath(now).name


def models_of(config: EvalConfig) -> dict[str, Any]:
    """The identities of the target and of each drafter, "" for one that is no file. Raises InputError."""
    return {
        "target": identity_of(config.target),
        "drafts": [drafted_by(name) for name in drafters_of(config)],
    }


def drafted_by(drafter: str) -> str:
    """The identity of what `--drafter` names: models, or a datastore's folder or skip set's file."""
    kind, _, value = drafter.partition(":")
    if kind in MODELS:
        names = [value] if kind != "model" or Path(value).exists() else value.split("+")
        return " ".join(map(identity_of, names))
    place = re.split(r",(?=\w+=)", value)[0]
    return identity_of(place) if place and Path(place).exists() else ""


def listed_models(record: dict[str, Any]) -> list[str]:
    """The identities of the target and the drafters; none in a record of an older version: the paths had to do."""
    models = record.get("models")
    return [models["target"], *models["drafts"]] if models else []


def moved(before: dict[str, Any] | None, config: EvalConfig) -> bool:
    """Whether target or head are named by another path than in the record that is there."""
    return before is not None and any(
        before["config"].get(place) != getattr(config, place) for place in PLACES
    )


def same_models(
    before: dict[str, Any] | None, models: dict[str, Any], config: EvalConfig, out: Path
) -> None:
    """Raises InputError where the answers that are there were given by other models than those now at these paths."""
    names = [f"target {config.target}", *(f"drafter {name}" for name in drafters_of(config))]
    for name, earlier, now in zip(
        names, listed_models(before or {}), listed_models({"models": models}), strict=False
    ):
        if earlier != now:
            raise InputError(
                f"the {name} has changed since {out} was begun: answers of both cannot be mixed; choose another --out"
            )
