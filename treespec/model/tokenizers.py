"""Tokenizers of targets."""

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treespec.demo.fetch import find_model_path
from treespec.errors import InputError
from treespec.model.folder import find_adapter_base, find_gguf_file, has_tokenizer_files, loading
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.quantization.gguf import load_own_or_gguf

# {tokenizer file: (module that reads it, package to install)}
TOKENIZER_PACKAGES = {
    "tekken.json": ("mistral_common", "mistral-common"),
    "tokenizer.model": ("sentencepiece", "sentencepiece"),
}


def load_tokenizer(path: str, placement: Placement = AS_IT_IS) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a directory or a hub id; None for a directory without one.

    If the model has no other tokenizer, the GGUF file's is loaded.

    Raises:
        InputError: it cannot be loaded.
    """
    path = find_model_path(path)
    folder = Path(path)
    file = find_gguf_file(path, placement)
    if file is None and folder.is_dir() and not has_tokenizer_files(folder):
        base = find_adapter_base(path)
        if base is None:
            return None
        return load_tokenizer(base, placement)
    with loading(path, "tokenizer of"):
        try:
            tokenizer: PreTrainedTokenizerBase = load_own_or_gguf(
                AutoTokenizer, path, file, placement
            )
        except Exception as error:  # the loaders raise whatever the file or hub gave them
            package = find_missing_package(folder, str(error))
            if package:
                raise InputError(package) from error
            raise
    return tokenizer


def find_missing_package(folder: Path, error: str) -> str:
    """Return an error line about a missing package that a directory's tokenizer needs; "" if none is missing.

    error: the message of the failed load.
    """
    if (folder / "tokenizer.json").is_file():
        return ""
    for name, (module, install) in TOKENIZER_PACKAGES.items():
        is_needed = (folder / name).is_file() or name in error
        if is_needed and find_spec(module) is None:
            return f"{name} takes the package {module}: pip install {install}"
    return ""
