"""What OUT/config.json says of a run, so that another one never goes on with its rows."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json
from treespec.model.identity import target_identity
from treespec.text.sources import digest
from treespec.train.datasets import data_file
from treespec.train.regenerate.config import RegenerateConfig

FORMAT = 1
# Options that change no row, only which are answered, how fast and where. Every lossless drafter gives the
# target's law, so a head may be added on the way.
FREE = {
    "out",
    "limit",
    "part",
    "batch",
    "head",
    "drafter",
    "tree",
    "verifier",
    "device_map",
    "allow_lossy",
    "trust_remote_code",
    "endpoint",
}


def record_of(
    config: RegenerateConfig, say: Callable[[str], None]
) -> tuple[dict[str, Any], Path | None]:
    """The options, with digests of target and data under "contents"; and the file of the data.

    Raises InputError where one of them is not there.
    """
    contents, data = {}, None
    if config.endpoint is None:
        contents["target"] = target_identity(config.target, config.variant)
    if config.data is not None:
        data = data_file(config.data, say)
        contents["data"] = digest(data)
    by = "a server" if config.endpoint else "the target"
    return {"format": FORMAT, "answers_by": by, **asdict(config), "contents": contents}, data


def check_record(path: Path, record: dict[str, Any], begun: bool) -> None:
    """Write the record of a new run; for one that has begun, raise InputError where its rows would differ."""
    if begun:
        before = read_json(path, f"delete {path.parent} to begin anew", FORMAT)
        for change in changes(before, record):
            raise InputError(
                f"{path.parent} holds rows with {change}; name another --out, or delete it"
            )
    write_json(path, record)


def changes(before: dict[str, Any], record: dict[str, Any]) -> Iterator[str]:
    """How an earlier run differs, an option at a time."""
    for name, now in record.items():
        if name in FREE or name == "contents":
            continue
        then = before.get(name)
        digests = before["contents"].get(name), record["contents"].get(name)
        differs = then != now if None in digests else digests[0] != digests[1]
        if differs:
            yield (
                f"{name} = {then!r}, not {now!r}"
                if then != now
                else f"another content of {name} = {now!r}"
            )
