"""Loading from a GGUF file by transformers: a config, a tokenizer, or weights, which it unpacks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging as bars

from treespec.files.quiet import quiet
from treespec.model.folder import resolve_model
from treespec.model.placement import Placement
from treespec.model.support import list_rotary_settings

log = logging.getLogger(__name__)


def load_own_or_gguf(loader: Any, path: str, file: Path | None, placement: Placement) -> Any:
    """Load a config or tokenizer from a model's files, else from its GGUF file.

    Args:
        loader: transformers' auto class.
        path: directory or hub id of the model.
        file: its GGUF file, None if there is none.
        placement: how the model is loaded.
    """
    options = resolve_model(path, placement)
    with quiet():
        try:
            return loader.from_pretrained(path, **options)
        except Exception:  # the loaders raise whatever the file or hub gave them
            if file is None:
                raise
            return loader.from_pretrained(file.parent, gguf_file=file.name, **options)


@contextmanager
def share_gguf_reader(placement: Placement) -> Iterator[None]:
    """Inside, the config, tokenizer and weights of a GGUF file share one parse of it.

    transformers parses the file for each of them: ten seconds each time, for a vocabulary of 150,000 tokens.
    """
    if placement.gguf is None or find_spec("gguf") is None:
        yield
        return
    import gguf

    package: Any = gguf
    reader = package.GGUFReader
    package.GGUFReader = lru_cache(1)(reader)  # transformers takes the name at each call
    try:
        yield
    finally:
        package.GGUFReader = reader


@contextmanager
def switch_gguf_bar() -> Iterator[None]:
    """Inside, the bar over the tensors of a GGUF file follows transformers' switch, as its other bars do."""
    try:
        from transformers import modeling_gguf_pytorch_utils as unpacking
    except ImportError:  # a version that unpacks elsewhere
        yield
        return
    module: Any = unpacking
    original_bar = getattr(module, "tqdm", bars.tqdm)
    module.tqdm = bars.tqdm
    try:
        yield
    finally:
        module.tqdm = original_bar


def warn_of_rotary_factors(file: Path, config: PreTrainedConfig) -> None:
    """Log a warning if a GGUF file scales its rotary positions and the config does not.

    transformers does not read these factors from a GGUF file (Llama 3.1 and later have them), so a config
    that comes only from the file describes another model.
    """
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError:  # before 5.23
        return
    metadata, tensors = read_gguf_metadata(str(file))
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    settings = list_rotary_settings(config.get_text_config())
    is_scaled = any(part.get("rope_type", "default") != "default" for part in settings)
    scales = kind != "none" or "rope_freqs.weight" in tensors
    if scales and not is_scaled:
        log.warning(
            "%s scales its rotary positions, and the config read for it does not, so the text is not "
            "its model's: give a --target that has the model's config.json",
            file.name,
        )
