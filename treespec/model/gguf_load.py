"""How transformers reads a config, a tokenizer or weights from a GGUF file."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel

log = logging.getLogger(__name__)


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


@contextmanager
def kept_in_blocks(file: Path | None) -> Iterator[None]:
    """Inside, transformers keeps the weights of a GGUF file in its blocks (`gguf_quantizer`).

    Versions without `GgufConfig` unpack them.
    """
    if file is None or not hasattr(transformers, "GgufConfig"):
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


def tell_of_unpacked(file: Path, model: PreTrainedModel) -> None:
    """Warn where a file's blocks were unpacked at loading, so that they take more memory."""
    header = getattr(getattr(model, "hf_quantizer", None), "header", None)
    plain = header is not None and not header.has_quantized_weights
    if plain or any(weight.dtype == torch.uint8 for weight in model.parameters()):
        return
    log.warning(
        "the weights of %s are unpacked: transformers %s keeps no blocks of its architecture or type",
        file.name,
        transformers.__version__,
    )
