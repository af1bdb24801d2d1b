"""What transformers reads from a GGUF file: a config, a tokenizer, or weights, which it unpacks."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

log = logging.getLogger(__name__)


def source(path: str, file: Path | None, name: str, where: Mapping[str, Any]) -> dict[str, str]:
    """Where `from_pretrained` of a config or tokenizer reads: the model's own, else the GGUF file.

    name: the file that tells whether the model has its own. where: `located` of the model.
    """
    if file is not None:
        options = {key: where[key] for key in ("revision", "local_files_only") if key in where}
        if cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options) is None:
            return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": path}


def tell_of_rotary_factors(file: Path, config: PreTrainedConfig) -> None:
    """Warn where a file scales its rotary positions and the config does not.

    transformers makes no such factors from a GGUF file (Llama 3.1 and later have them), so a config
    that comes from the file alone describes another model.
    """
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError:  # before 5.23
        return
    metadata, tensors = read_gguf_metadata(str(file))
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    scaled = any(part.get("rope_type", "default") != "default" for part in parts)
    if scaled or (kind == "none" and "rope_freqs.weight" not in tensors):
        return
    log.warning(
        "%s scales its rotary positions, and the config read for it does not, so the text is not "
        "its model's: give a --target that has the model's config.json",
        file.name,
    )
