"""The table of published draft heads, `published.toml`: which heads there are for a target. It loads no torch."""

import json
import logging
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from treespec.errors import InputError

log = logging.getLogger(__name__)

PUBLISHED_HEADS = Path(__file__).with_name("published.toml")
HUB_CACHE_FOLDER = re.compile(
    r"models--([^/\\]+)--([^/\\]+)"
)  # .../models--OWNER--NAME/snapshots/COMMIT
MIN_SIMILARITY = 0.7  # of a name that is suggested
NO_HEAD_ADVICE = "treespec heads lists the published ones; without --head the text itself drafts"


@dataclass(frozen=True)
class PublishedHead:
    """A line of the table.

    Attributes:
        target: hub id of the target.
        head: hub id of the head.
        kind: a key of `treespec.heads.registry.HEAD_KINDS`.
        project: who trained or lists the head.
        licence: as the head's card names it; "" if the card was not seen.
        date: when the project first listed the head, as YYYY-MM-DD.
    """

    target: str
    head: str
    kind: str
    project: str
    licence: str
    date: str


@cache
def read_published_heads() -> tuple[PublishedHead, ...]:
    """Read the table, in the order of the file."""
    table = tomllib.loads(PUBLISHED_HEADS.read_text(encoding="utf-8"))
    return tuple(PublishedHead(**row) for row in table["heads"])


def list_heads_for(target: str) -> list[PublishedHead]:
    """List the published heads of a target, the one that `--head auto` takes first.

    target: hub id, in any case, or a directory whose config.json names the hub id.
    """
    name = find_hub_name(target).lower()
    return [row for row in read_published_heads() if row.target.lower() == name]


def find_hub_name(target: str) -> str:
    """Find the hub id of a target's directory, from the hub's cache or its config.json; any other name as it is."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return target
    cached = HUB_CACHE_FOLDER.search(str(folder.resolve()))
    if cached:
        return f"{cached[1]}/{cached[2]}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading the target says so
        return target
    if not isinstance(config, dict):
        return target
    return str(config.get("_name_or_path") or target)


def find_similar_target(target: str) -> str:
    """Find the target of the table with the most similar name, as in ` (did you mean …?)`; "" without one."""
    targets: dict[str, str] = {}
    for row in read_published_heads():
        full_name = row.target.lower()
        targets[full_name] = row.target
        targets.setdefault(full_name.partition("/")[2], row.target)
    similar = get_close_matches(find_hub_name(target).lower(), targets, n=1, cutoff=MIN_SIMILARITY)
    if not similar:
        return ""
    return f" (did you mean {targets[similar[0]]}?)"


def choose_published_head(target: str) -> PublishedHead:
    """Choose the published head of a target for `--head auto`, and log which one it is.

    Raises: InputError if the table has none.
    """
    rows = list_heads_for(target)
    if not rows:
        hub_name = find_hub_name(target)
        name = target
        if hub_name != target:
            name = f"{hub_name}, which is in {target}"
        raise InputError(
            f"--head auto: no published head is known for {name}{find_similar_target(target)}: "
            f"{NO_HEAD_ADVICE}"
        )
    row = rows[0]
    log.warning("--head auto takes %s (%s, from %s)", row.head, row.kind, row.project)
    return row
