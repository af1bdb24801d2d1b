"""Tokenizers of targets."""

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treespec.demo.fetch import model_path
from treespec.errors import InputError, first_line
from treespec.files.quiet import quiet
from treespec.model.folder import gguf_file, located
from treespec.model.gguf_load import source
from treespec.model.identity import base_of
from treespec.model.placement import AS_IT_IS, Placement

# a file of a tokenizer -> the module that reads it, and what installs that
PACKAGES = {
    "tekken.json": ("mistral_common", "mistral-common"),
    "tokenizer.model": ("sentencepiece", "sentencepiece"),
}
WORDS = ("token", "tek")  # what the names of such files begin with


def load_tokenizer(path: str, how: Placement = AS_IT_IS) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a directory or a hub id; None for a directory without one.

    A GGUF file gives its tokenizer where the model has no other.
    Raises InputError where it cannot be loaded.
    """
    path = model_path(path)
    where, file = located(path, how), gguf_file(path, how)
    try:
        where |= source(path, file, "tokenizer_config.json", where)
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**where)
        return tokenizer
    except Exception as error:  # the loaders raise whatever the file or hub gave them
        folder, why = Path(path), first_line(error)
        if folder.is_dir() and not any(file.name.startswith(WORDS) for file in folder.iterdir()):
            base = base_of(path)
            return load_tokenizer(base, how) if base else None
        if "backend tokenizer" in why:
            why = "its files are missing or damaged (tokenizer.json)"
        if "trust_remote_code" in str(error):
            why = "it brings Python code of its own, which would run here; "
            why += "read it, then give --trust-remote-code"
        for name, (module, install) in PACKAGES.items():
            known = (folder / name).is_file() or name in str(error)
            alone = known and not (folder / "tokenizer.json").is_file()
            if alone and find_spec(module) is None:
                why = f"{name} takes the package {module}: pip install {install}"
        raise InputError(f"cannot load the tokenizer of {path!r}: {why}") from error
