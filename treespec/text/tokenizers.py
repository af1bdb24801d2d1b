"""Tokenizers of targets."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treespec.demo.fetch import model_path
from treespec.errors import InputError, first_line
from treespec.gguf_file import gguf_file
from treespec.model.gguf_load import source
from treespec.model.weights import located
from treespec.variant import AS_IT_IS, Variant


def load_tokenizer(
    path: str, trust_remote_code: bool = False, variant: Variant = AS_IT_IS
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a directory or a hub id; None for a directory without one.

    variant: as for `load_model`. A GGUF file gives its tokenizer where the model has no other.
    Raises InputError where it cannot be loaded.
    """
    path = model_path(path)
    where = located(path, trust_remote_code, variant)
    file = gguf_file(path, variant)
    try:
        where |= source(path, file, "tokenizer_config.json", where)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**where)
        return tokenizer
    except Exception as error:  # the loaders raise whatever the file or hub gave them
        if Path(path).is_dir() and not list(Path(path).glob("token*")):
            return None
        why = first_line(error)
        if "backend tokenizer" in why:
            why = "its files are missing or damaged (tokenizer.json)"
        if "trust_remote_code" in str(error):
            why = "it brings Python code of its own, which would run here; "
            why += "read it, then give --trust-remote-code"
        raise InputError(f"cannot load the tokenizer of {path!r}: {why}") from error
