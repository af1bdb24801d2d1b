"""What OUT/training says of a run: its options, its target and data by content, and its result.

config.json is written with the first checkpoint. A run that failed before it left nothing that
another run must agree with.
"""

from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from treespec.errors import InputError
from treespec.files import read_json, write_json
from treespec.identity import identity_of
from treespec.text.sources import digest
from treespec.train.checkpoint import FILE
from treespec.train.config import TrainConfig
from treespec.train.datasets import data_file
from treespec.train.validate import Validation

Record = dict[
    str, object
]  # the options of a run, and under "contents" the digests of target and data
PATHS = ("target", "data", "features")


def record_of(config: TrainConfig) -> Record:
    """The options of a run, and under "contents" the digests of its target and data.

    Raises InputError where one of them is not there.
    """
    data = digest(data_file(config.data))
    return asdict(config) | {"contents": {"target": identity_of(config.target), "data": data}}


def finished(folder: Path, record: Record) -> Validation | None:
    """The result of a finished run of the same record; None where there is still something to do.

    folder: OUT/training. Raises InputError where a run of other options, target or data lies there,
    and for a damaged file.
    """
    result = folder / "result.json"
    if not result.exists() and not (folder / FILE).exists():
        return None
    before = read_json(folder / "config.json", f"delete {folder} to begin anew")
    if changed := next(changes(before, record), None):
        raise InputError(
            f"{folder.parent} holds a run with {changed}; name another --out, or delete it"
        )
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


def changes(before: Record, record: Record) -> Iterator[str]:
    """How an earlier run differs, an option at a time.

    Runs of older versions lack contents, and options that are newer: those have their defaults.
    """
    if "save_dtype" not in before and before.get("unrolled_steps") == 7:
        before = before | {"unrolled_steps": None}  # the default of older versions, EAGLE-3's alone
    old_digests, new_digests = digests(before), digests(record)
    for field in fields(TrainConfig):
        name = field.name
        default = None if field.default is MISSING else field.default
        then, now = before.get(name, default), record[name]
        old, new = old_digests.get(name), new_digests.get(name)
        if name == "out":  # its folder may have been moved
            continue
        if old and new:
            if old != new and then != now:
                yield f"{name} = {then!r}, not {now!r}"
            elif old != new:
                yield f"another content of {name} = {now!r}"
        elif then != now and not (name in PATHS and same_path(then, now)):
            yield f"{name} = {then!r}, not {now!r}"


def began_with_all_tokens(folder: Path) -> bool:
    """Whether a run of a version before `--loss` lies there: EAGLE-3 drafted all tokens by default.

    folder: OUT/training.
    """
    file = folder / "config.json"
    return file.exists() and "loss" not in read_json(file, f"delete {folder} to begin anew")


def digests(record: Record) -> Record:
    """The digests of target and data file; none in a record of an older version."""
    contents = record.get("contents")
    return contents if isinstance(contents, dict) else {}


def same_path(one: object, other: object) -> bool:
    """Whether two paths lead to the same file or folder, relative or absolute."""
    return (
        isinstance(one, str)
        and isinstance(other, str)
        and Path(one).resolve() == Path(other).resolve()
    )
