"""Tokenizers of targets."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from treespec.errors import InputError, first_line


def load_tokenizer(path: str) -> Any:
    """Of a directory or a hub id; None for a directory without one. Raises InputError for what cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the loaders raise whatever the file or hub gave them
        if Path(path).is_dir() and not list(Path(path).glob("token*")):
            return None
        raise InputError(f"cannot load the tokenizer of {path!r}: {first_line(error)}") from error
