"""A GGUF file: where it lies, and how transformers reads a config, tokenizer or weights from it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from treespec.errors import InputError, first_line
from treespec.heads.hub import only_cached
from treespec.variant import Variant

log = logging.getLogger(__name__)


def gguf_file(path: str, variant: Variant) -> Path | None:
    """The file of `gguf:FILE`; None for any other form.

    path: the target's directory or hub id, which FILE may lie in. Raises InputError for a file that
    is not there, and where the gguf package is missing.
    """
    # 1. A path, or a name in the directory.
    if variant.gguf is None:
        return None
    if find_spec("gguf") is None:
        raise InputError(f"--load-in {variant.load_in} takes one more package: pip install gguf")
    named = Path(variant.gguf).expanduser()
    for file in (named, Path(path).expanduser() / named):
        if file.is_file():
            return _checked(file.resolve())
    start = f"--load-in {variant.load_in}: no such file"
    if Path(path).expanduser().is_dir():
        raise InputError(f"{start}, neither here nor in {path}")

    # 2. A name in the hub's repository.
    try:
        offline = only_cached(path, variant.revision)
        file = Path(
            hf_hub_download(path, variant.gguf, revision=variant.revision, local_files_only=offline)
        )
    except Exception as error:  # of many kinds; its first line gives the reason
        raise InputError(
            f"{start} here, and the hub's {path} did not give it: {first_line(error)}"
        ) from error
    return _checked(file)


def source(path: str, file: Path | None, name: str, where: Mapping[str, Any]) -> dict[str, str]:
    """Where `from_pretrained` of a config or tokenizer reads: the model's own, else the GGUF file.

    name: the file that tells whether the model has its own. where: `located` of the model.
    """
    if file is not None and _lacks(path, name, where):
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": path}


def _lacks(path: str, name: str, where: Mapping[str, Any]) -> bool:
    """Whether a directory or a hub repository has no file of that name."""
    if Path(path).is_dir():
        return not (Path(path) / name).is_file()
    options = {key: where[key] for key in ("revision", "local_files_only") if key in where}
    try:
        hf_hub_download(path, name, **options)
    except EntryNotFoundError:  # of the hub, or of its cache
        return True
    return False


def _checked(file: Path) -> Path:
    """Raises InputError for a file that does not begin as GGUF does."""
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise InputError(f"{file} is no GGUF file: it does not begin with GGUF")
    return file


@contextmanager
def kept_in_blocks(file: Path | None) -> Iterator[None]:
    """Inside, transformers keeps the weights of a GGUF file in its blocks (`gguf_quantizer`).

    Versions without `GgufConfig` unpack them.
    """
    if file is None:
        yield
        return
    if not hasattr(transformers, "GgufConfig"):
        log.warning(
            "transformers %s unpacks %s; 5.23 and later keep its weights in blocks",
            transformers.__version__,
            file.name,
        )
        yield
        return
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    from treespec.model.gguf_quantizer import BlockQuantizer

    before = AUTO_QUANTIZER_MAPPING["gguf"]
    AUTO_QUANTIZER_MAPPING["gguf"] = BlockQuantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING["gguf"] = before
