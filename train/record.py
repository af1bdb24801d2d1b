"""What OUT/training says of a run: its options, its target and data by content, and its result.

config.json is written with the first checkpoint. A run that failed before it left nothing that
another run must agree with.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json
from treespec.model.identity import target_identity
from treespec.text.sources import digest
from treespec.train.checkpoints import latest_step
from treespec.train.config import TrainConfig
from treespec.train.datasets import data_file
from treespec.train.kinds import recipe_of
from treespec.train.validate import Validation

FORMAT = 1
Record = dict[str, Any]  # the options of a run, its "recipe", and digests under "contents"
PATHS = ("target", "data", "features")
ENDS = {"epochs", "max_steps", "minutes", "patience"}  # when a run ends
MAY_CHANGE = ENDS | {
    "validate_every",
    "validate_on",
    "draft_steps",
    "decode_on",
    "decode_tokens",
    "checkpoint_every",
    "tracker",
    "calibrate",
}


def record_of(config: TrainConfig) -> Record:
    """The options of a run, and under "contents" the digests of its target and data.

    Raises InputError where one of them is not there.
    """
    recipe = {"recipe": asdict(recipe_of(config))}
    contents = {
        "target": target_identity(config.target, config.variant),
        "data": digest(data_file(config.data)),
    }
    return asdict(config) | recipe | {"contents": contents, "format": FORMAT}


def begun(folder: Path) -> Record | None:
    """The record of a run that left a checkpoint or a result; None where there is none.

    folder: OUT/training. Raises InputError for a damaged record.
    """
    if not (folder / "result.json").exists() and latest_step(folder) is None:
        return None
    return read_json(folder / "config.json", f"delete {folder} to begin anew", FORMAT)


def continued(config: TrainConfig, before: Record | None) -> TrainConfig:
    """The options of a run, where those left to the kind's recipe are as it began.

    A later version may have other recipes, and the same command still goes on.
    """
    if before is None or before.get("head", config.head) != config.head:
        return config
    defaults = {"mixed_precision": "no"} | before["recipe"]
    left_out: dict[str, Any] = {
        name: before[name] if before.get(name) is not None else value
        for name, value in defaults.items()
        if getattr(config, name, "") is None
    }
    return replace(config, **left_out)


def finished(folder: Path, before: Record | None, record: Record) -> Validation | None:
    """The result of a finished run of the same record; None where there is still something to do.

    before: what `begun` read. Raises InputError where a run of other options, target or data lies
    there, and for a damaged file.
    """
    if before is None:
        return None
    changed = list(changes(before, record))
    refused = [text for name, text in changed if name not in MAY_CHANGE]
    if refused:
        raise InputError(
            f"{folder.parent} holds a run with {refused[0]}; name another --out, or delete it"
        )
    result = folder / "result.json"
    if any(name in ENDS for name, _ in changed):
        return None
    if not result.exists() or not (folder.parent / "model.safetensors").exists():
        return None
    remedy = "delete it, and the same command ends the run again"
    try:
        return Validation(**read_json(result, remedy))
    except TypeError as error:
        raise InputError(f"{result} is damaged: {remedy}") from error


def keep(folder: Path, record: Record) -> None:
    """Write what `finished` compares with."""
    write_json(folder / "config.json", record)


def changes(before: Record, record: Record) -> Iterator[tuple[str, str]]:
    """How an earlier run differs, an option at a time: its name, and the difference in words.

    Options that the recipe settles are compared as it settles them.
    """
    old_recipe, new_recipe = before["recipe"], record["recipe"]
    for field in fields(TrainConfig):
        # 1. An option of both; a recipe settles some.
        name = field.name
        then, now = before.get(name), record[name]
        if name in new_recipe:
            then = old_recipe.get(name) if then is None else then
            now = new_recipe[name]

        # 2. What differs. Contents count and not paths.
        old, new = before["contents"].get(name), record["contents"].get(name)
        if name == "out":  # its folder may have been moved
            continue
        if old and new:
            if old != new and then != now:
                yield name, f"{name} = {then!r}, not {now!r}"
            elif old != new:
                yield name, f"another content of {name} = {now!r}"
        elif then != now and not (name in PATHS and same_path(then, now)):
            yield name, f"{name} = {then!r}, not {now!r}"


def same_path(one: object, other: object) -> bool:
    """Whether two paths lead to the same file or folder, relative or absolute."""
    return (
        isinstance(one, str)
        and isinstance(other, str)
        and Path(one).resolve() == Path(other).resolve()
    )
